# SPDX-License-Identifier: Apache-2.0
"""Uploads beside training, and what is checked before it, by the real client against a Hub of the tests over HTTP."""

import functools
import json
import multiprocessing
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError

from hub_server import READ_TOKEN, TOKEN, WRONG_TOKEN, HubServer
from paco_trl.hub import pushing, repositories
from paco_trl.hub.files import JUDGE, JUDGE_ADAPTER, PIPELINE_ADAPTER, TRANSFORMER
from paco_trl.hub.pushing import select_files
from paco_trl.hub.repositories import prepare_repo
from paco_trl.utils.model_files import CARD_DATA_FILE
from paco_trl.utils.stopping import EXIT_CODE, raise_stop


PATTERNS = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "README.md",
    "curves.png",
    "sheet_*.png",
    CARD_DATA_FILE,
]


# ---- What the client does ----


def make_checkpoint(output_dir: str, step: int, base: str | None = "someone/base", pictures=("curves.png",)) -> str:
    """A folder with the files of a published adapter and others."""
    folder = Path(output_dir) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": base}))
    for name in ("adapter_model.safetensors", "README.md", *pictures):
        (folder / name).write_text(f"{name} of step {step}")
    (folder / "optimizer.pt").write_text(f"optimizer of step {step}")
    (folder / "training_args.bin").write_text(TOKEN)
    (folder / "deep").mkdir()
    (folder / "deep" / "state.pt").write_text(f"deep state of step {step}")
    return str(folder)


def pusher_of(output_dir: str, revision: str | None = None):
    return pushing.HubPusher(HfApi(token=TOKEN), "tester/adapter", revision, Path(output_dir), PATTERNS)


def push_steps(output_dir: str, steps: list[int], whole=None, revision=None, base="someone/base") -> None:
    """Pushes checkpoints one after the other, each when the one before it has arrived or failed."""
    pusher = pusher_of(output_dir, revision)
    for step in steps:
        folder = make_checkpoint(output_dir, step, base, ["curves.png", f"sheet_{step}.png"])
        name = {"last": "last-checkpoint", "all": f"checkpoint-{step}"}.get(whole)
        pusher.push_checkpoint(folder, f"step {step}", name)
        pusher.wait()


def push_at_once(output_dir: str, steps: list[int], whole: bool = False, replace: bool = True) -> None:
    """
    Pushes checkpoints without waiting, and deletes each at once, as `save_total_limit` may. The second comes when the
    upload of the first has begun: else it might replace the first, too.
    """
    pusher = pusher_of(output_dir)
    for step in steps:
        folder = make_checkpoint(output_dir, step)
        pusher.push_checkpoint(folder, f"step {step}", f"checkpoint-{step}" if whole else None, replace)
        shutil.rmtree(folder)
        for _ in range(6000):
            if Path(output_dir, "first on its way").exists():
                break
            time.sleep(0.01)
    Path(output_dir, "all asked for").touch()
    pusher.wait()


def push_model(output_dir: str, step: int) -> str:
    folder = make_checkpoint(output_dir, step)
    return pusher_of(output_dir).push_model(folder, "the end").oid


def prepare(repo_id: str, token: str | None = TOKEN, **kwargs) -> str:
    kwargs = {"private": None, "revision": None, "base_model": None, "published_patterns": PIPELINE_ADAPTER, **kwargs}
    return prepare_repo(HfApi(token=token), repo_id, **kwargs)


# ---- Tests ----


@pytest.fixture
def hub():
    with HubServer({TOKEN: "tester", READ_TOKEN: "tester"}, organizations=["team"]) as server:
        server.readers.add(READ_TOKEN)
        yield server


@pytest.fixture
def run(hub, tmp_path):
    return functools.partial(hub.call, tmp_path / "cache")


def titles(hub: HubServer) -> list[str]:
    return [title for title in hub.repos["model", "tester/adapter"].titles.values() if title]


@pytest.fixture
def repository(hub):
    hub.add_repo("tester/adapter", {".gitattributes": b""})


@pytest.mark.parametrize(
    ("cause", "is_outage"),
    [
        (LocalEntryNotFoundError("no connection"), True),
        (TimeoutError("of Xet"), True),
        (BrokenPipeError("closed"), True),
        (repositories.HTTPError("no route"), True),
        (FileNotFoundError("a staged file"), False),
        (PermissionError("a staged file"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("an empty file"), False),
        (None, False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_wrapped", [True, False])  # as LFS does
def test_what_is_an_outage(cause, is_outage, is_wrapped):
    error = RuntimeError("Error while uploading 'x'") if is_wrapped or cause is None else cause
    with (
        pytest.raises(ConnectionError if is_outage else type(error)) as raised,
        repositories.explain_outages(HfApi(), "Later."),
    ):
        raise error from (cause if is_wrapped else None)
    assert ("Later." in str(raised.value)) is is_outage and (is_outage or raised.value is error)


@pytest.mark.usefixtures("repository")
class TestUploads:
    def test_only_the_published_files_of_the_last_step_leave(self, hub, run, tmp_path):
        run(push_steps, str(tmp_path / "out"), [2, 4])
        files = hub.files("tester/adapter", "model")
        assert set(files) == {".gitattributes", "curves.png", "sheet_4.png", *PATTERNS[:3]}
        assert files["adapter_model.safetensors"] == b"adapter_model.safetensors of step 4"
        # They exist, and stay; what was linked for the upload does not
        assert (tmp_path / "out/checkpoint-4/optimizer.pt").exists()
        assert list((tmp_path / "out/.pushing").iterdir()) == []
        # Pictures of earlier steps go in the same commit
        assert titles(hub) == ["step 2", "step 4"]

    @pytest.mark.parametrize("patterns", [PIPELINE_ADAPTER, TRANSFORMER, JUDGE_ADAPTER, JUDGE])
    def test_states_and_files_of_the_user_do_not_leave(self, tmp_path, patterns):
        for name in ("training_args.bin", "optimizer.pt", "trainer_state.json", "run.json", "mine.png", "notes.txt"):
            (tmp_path / name).touch()
        assert select_files(tmp_path, patterns) == {}
        (tmp_path / "README.md").touch()
        assert list(select_files(tmp_path, patterns)) == ["README.md"]

    @pytest.mark.parametrize("name", ["sheet_2.png", "deep_sheet.png"])
    def test_what_an_earlier_upload_had_besides_goes_from_its_place_alone(self, hub, run, tmp_path, monkeypatch, name):
        """A pattern of the client's would match in every directory, also in full checkpoints."""
        monkeypatch.setitem(globals(), "PATTERNS", [*PATTERNS, "*_sheet.png"])
        others = [f"checkpoint-1/{name}", "mine.png", "notes/sheet_2.png"]
        hub.add_repo("tester/adapter", dict.fromkeys([name, *others], b""))
        run(push_steps, str(tmp_path / "out"), [4])
        assert name not in hub.files("tester/adapter", "model") and {*others} <= {
            *hub.files("tester/adapter", "model")
        }

    def test_whole_checkpoints(self, hub, run, tmp_path):
        run(push_steps, str(tmp_path / "last"), [2, 4], whole="last")
        files = hub.files("tester/adapter", "model")
        assert files["last-checkpoint/deep/state.pt"] == b"deep state of step 4"
        assert files["last-checkpoint/optimizer.pt"] == b"optimizer of step 4"
        assert not any(name.startswith("checkpoint-") for name in files)
        assert "last-checkpoint/sheet_2.png" not in files and "last-checkpoint/sheet_4.png" in files
        run(push_steps, str(tmp_path / "all"), [6, 8], whole="all")
        files = hub.files("tester/adapter", "model")
        assert files["checkpoint-6/optimizer.pt"] == b"optimizer of step 6"
        assert files["checkpoint-8/optimizer.pt"] == b"optimizer of step 8"
        assert "checkpoint-6/sheet_6.png" in files and "sheet_6.png" not in files
        assert not any("training_args" in name for name in files)  # it holds the token

    def test_no_path_of_this_machine(self, hub, run, tmp_path):
        base = str(tmp_path / "models" / "tiny-base")
        run(push_steps, str(tmp_path / "out"), [2], base=base, whole="last")
        for name in ("adapter_config.json", "last-checkpoint/adapter_config.json"):
            config = json.loads(hub.files("tester/adapter", "model")[name])
            assert config["base_model_name_or_path"] == "tiny-base"
        # By its record the full checkpoint is not cut short
        size = (tmp_path / "out/checkpoint-2/adapter_config.json").stat().st_size
        assert len(hub.files("tester/adapter", "model")["last-checkpoint/adapter_config.json"]) >= size
        # The checkpoint still loads on this machine
        assert base in (tmp_path / "out/checkpoint-2/adapter_config.json").read_text()
        run(push_steps, str(tmp_path / "other"), [2])
        config = json.loads(hub.files("tester/adapter", "model")["adapter_config.json"])
        assert config["base_model_name_or_path"] == "someone/base"


@pytest.mark.parametrize(("error", "is_bug"), [(KeyError("oid"), True), (ConnectionError("no answer"), False)])
def test_a_bug_of_an_upload_keeps_its_traceback(tmp_path, monkeypatch, caplog, error, is_bug):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(pushing.HubPusher, "_upload", fail)
    push_steps(str(tmp_path), [1])
    (record,) = caplog.records
    assert str(error) in record.message and bool(record.exc_info) == is_bug


@pytest.mark.usefixtures("repository")
class TestOutages:
    @pytest.mark.parametrize("fault", ["500", "cut"])
    def test_once_at_each_request(self, hub, run, tmp_path, fault):
        output_dir, failed = tmp_path / "out", set()
        # By Xet, which is not used here, the client retries the commit, too
        places = {2: "/tree/main", 4: "/preupload/main", 6: "/lfs/"}

        def fail_once(method: str, path: str) -> str | None:
            for step, place in places.items():
                is_asked = place in path
                if is_asked and step not in failed and (output_dir / f"checkpoint-{step}").exists():
                    failed.add(step)
                    return fault
            return None

        hub.fault = fail_once
        outcome = run(push_steps, str(output_dir), list(places))
        assert failed == set(places)
        assert "was not pushed" not in outcome["log"]
        assert hub.files("tester/adapter", "model")["README.md"] == b"README.md of step 6"
        assert titles(hub) == [f"step {step}" for step in places]

    def test_longer_than_the_attempts(self, hub, run, tmp_path):
        output_dir = tmp_path / "out"
        later = output_dir / "checkpoint-4"
        hub.fault = lambda method, path: "500" if "/commit/" in path and not later.exists() else None
        outcome = run(push_steps, str(output_dir), [2, 4])
        # Reported with the place and with what to do, and with the next one everything is there
        assert "was not pushed to the Hub, and training continues" in outcome["log"]
        assert f"paco-trl push {output_dir}" in outcome["log"] and hub.url in outcome["log"]
        assert titles(hub) == ["step 4"]

    def test_until_the_end(self, hub, run, tmp_path):
        hub.fault = lambda method, path: "500" if "/commit/" in path else None
        now = run(push_model, str(tmp_path / "now"), 2)
        assert now["error"] == "ConnectionError" and f"paco-trl push {tmp_path / 'now'}" in now["message"]
        assert titles(hub) == [] and list((tmp_path / "now/.pushing").iterdir()) == []

    def test_to_another_branch(self, hub, run, tmp_path):
        assert run(prepare, "tester/adapter", revision="try")["result"]
        run(push_steps, str(tmp_path), [20], whole="all", revision="try")
        assert "checkpoint-20/README.md" in hub.files("tester/adapter", "model", "try")
        assert set(hub.files("tester/adapter", "model")) == {".gitattributes"}

    def test_refused_for_good(self, hub, run, tmp_path):
        def fault(method: str, path: str) -> str | None:
            if "/commit/" not in path:
                return None
            shutil.rmtree(tmp_path / "out/.pushing")  # as another process may; it must not hide the refusal
            return "422"

        hub.fault = fault
        outcome = run(push_model, str(tmp_path / "out"), 2)
        assert "422" in outcome["message"] and "paco-trl push" not in outcome["message"]  # it would be refused again

    def test_no_answer(self, hub, run, tmp_path, monkeypatch):
        monkeypatch.setattr(repositories, "_TIMEOUT", (1.0, 1.0, 1.0, None))
        hub.latency = 20.0
        hub.fault = lambda method, path: "slow" if "/commit/" in path else None
        outcome = run(push_model, str(tmp_path / "out"), 2)
        assert outcome["error"] == "ConnectionError" and "Timeout" in outcome["message"]

    def test_the_right_is_taken_away(self, hub, run, tmp_path):
        hub.fault = lambda method, path: "403" if "/commit/" in path else None
        outcome = run(push_steps, str(tmp_path / "out"), [2])
        assert "training continues. 403 Forbidden" in outcome["log"] and "Retrying" not in outcome["log"]

    def test_a_push_that_is_not_waited_for_is_of_what_was_there(self, hub, run, tmp_path):
        def push_and_save_again(output_dir: str) -> None:
            pusher, folder = pusher_of(output_dir), Path(make_checkpoint(output_dir, 2))
            future = pusher.push_model(folder, "the end", blocking=False)
            for name in ("README.md", "adapter_model.safetensors"):
                (folder / name).unlink()
                (folder / name).write_text("saved again")
            (folder.parent / "all asked for").touch()
            future.result()

        hub.fault = self.held_until(tmp_path / "out" / "all asked for")
        outcome = run(push_and_save_again, str(tmp_path / "out"))
        assert "error" not in outcome, outcome["log"]
        files = hub.files("tester/adapter", "model")
        for name in ("README.md", "adapter_model.safetensors"):
            assert files[name].decode() == f"{name} of step 2"
        assert list((tmp_path / "out/.pushing").iterdir()) == []

    def test_the_newest_of_several(self, hub, run, tmp_path):
        output_dir = tmp_path / "out"
        hub.fault = self.held_until(output_dir / "all asked for")
        run(push_at_once, str(output_dir), [2, 4, 6])
        # The first was on its way; the second was replaced by the third
        assert titles(hub) == ["step 2", "step 6"]
        assert hub.files("tester/adapter", "model")["README.md"] == b"README.md of step 6"

    def test_one_that_came_while_another_failed(self, hub, run, tmp_path):
        output_dir, failed = tmp_path / "out", []
        hold = self.held_until(output_dir / "all asked for")

        def fault(method: str, path: str) -> str | None:
            hold(method, path)
            if "/commit/" in path and not failed:
                failed.append(path)
                return "500"
            return None

        hub.fault = fault
        outcome = run(push_at_once, str(output_dir), [2, 4, 6])
        assert "was not pushed" in outcome["log"] and len(failed) == 1
        assert titles(hub) == ["step 6"]

    @pytest.mark.parametrize("whole", [False, True])
    def test_all_of_several(self, hub, run, tmp_path, whole):
        output_dir = tmp_path / "out"
        hub.fault = self.held_until(output_dir / "all asked for")
        run(push_at_once, str(output_dir), [2, 4, 6], whole, replace=False)
        assert titles(hub) == ["step 2", "step 4", "step 6"]
        if whole:
            files = hub.files("tester/adapter", "model")
            assert {f"checkpoint-{step}/optimizer.pt" for step in (2, 4, 6)} <= set(files)

    def test_the_end_of_a_process_does_not_wait(self, hub, tmp_path):
        """A scheduler that has stopped it would kill it, and see that in place of the code to try again."""

        def push_and_stop() -> None:
            pusher_of(str(tmp_path)).push_checkpoint(make_checkpoint(str(tmp_path), 2), "step 2")
            asked.wait(60)
            raise_stop(signal.SIGTERM)

        def fault(method: str, path: str) -> None:
            asked.set()
            ended.wait(60)

        context, ended = multiprocessing.get_context("fork"), threading.Event()
        asked, hub.fault = context.Event(), fault
        with hub.connected(tmp_path / "cache"):
            worker = context.Process(target=push_and_stop)
            worker.start()
            worker.join(50)
            code = worker.exitcode
            worker.kill()
            ended.set()
        assert code == EXIT_CODE

    @staticmethod
    def held_until(path: Path):
        """The Hub answers no commit until a file is there: a client that waited for it would wait for ever."""

        def hold(method: str, asked: str) -> None:
            if "/commit/" in asked:
                path.with_name("first on its way").touch()
                for _ in range(6000):
                    if path.exists():
                        return
                    time.sleep(0.01)
                raise AssertionError("the client waited for the upload")

        return hold


class TestChecks:
    def test_new_repository(self, hub, run):
        assert run(prepare, "adapter", private=True)["result"] == "tester/adapter"
        assert hub.repos["model", "tester/adapter"].private
        assert run(prepare, "team/adapter")["result"] == "team/adapter"
        assert not hub.repos["model", "team/adapter"].private
        # Again, as a run that goes on does
        assert run(prepare, "team/adapter")["result"] == "team/adapter"

    @pytest.mark.parametrize(
        "arguments, error, token",
        [
            ({"token": None}, "LocalTokenNotFoundError", "hf auth login"),
            ({"token": WRONG_TOKEN}, "HfHubHTTPError", "Invalid user token"),
            ({"token": READ_TOKEN}, "HfHubHTTPError", "no write role"),
            ({"repo_id": "others/adapter"}, "HfHubHTTPError", "'others'"),
            ({"repo_id": "tester/new"}, "BadRequestError", "'new' is reserved"),
        ],
    )
    def test_refused(self, hub, run, arguments, error, token):
        hub.reserved.add("new")
        outcome = run(prepare, **{"repo_id": "tester/adapter", **arguments})
        assert outcome.get("error") == error and token in outcome["message"], outcome
        assert not hub.repos

    def test_no_right_to_a_repository_that_exists(self, hub, run):
        hub.add_repo("team/adapter", {"README.md": b""})
        hub.fault = lambda method, path: "403" if path.endswith("auth-check/write") else None
        assert "403" in run(prepare, "team/adapter")["message"]

    def test_something_else_is_there(self, hub, run):
        others = {"unet/weights.bin": b"1", "sheets/a.png": b"2", "LICENSES/a.txt": b"3"}
        hub.add_repo("tester/adapter", {"README.md": b"", "LICENSE.txt": b"", **others})
        outcome = run(prepare, "tester/adapter")
        assert outcome["error"] == "ValueError"
        assert "tester/adapter has 3 other files" in outcome["message"]
        assert run(prepare, "tester/empty")["result"]
        # A new branch would begin with them
        assert "other files" in run(prepare, "tester/adapter", revision="try")["message"]
        assert list(hub.repos["model", "tester/adapter"].branches) == ["main"]

    def test_a_model_of_something_else_is_there(self, hub, run):
        weights = {"adapter_model.safetensors": b"1", "last-checkpoint/deep/a.pt": b"", "mine.txt": b""}
        hub.add_repo("tester/adapter", {CARD_DATA_FILE: b'{"base_model": "some/Base"}', **weights})
        assert run(prepare, "tester/adapter", base_model="some/base")["result"]
        outcome = run(prepare, "tester/adapter", base_model="some/other")
        assert outcome["error"] == "ValueError"
        assert "some/Base" in outcome["message"] and "some/other" in outcome["message"]
        # Weights that the push would leave there
        own = ["adapter_model.safetensors", "README.md"]
        assert run(prepare, "tester/adapter", base_model="some/base", published_patterns=own)["result"]
        outcome = run(prepare, "tester/adapter", base_model="some/base", published_patterns=["model*.safetensors"])
        assert "has other weights, such as 'adapter_model.safetensors'" in outcome["message"]

    def test_a_trainer_asked_to_push_in_private(self, hub, make_trainer, tmp_path):
        hub.add_repo("tester/open", {"README.md": b""})
        trainer = make_trainer(hub_model_id="tester/open", hub_token=TOKEN)
        with hub.connected(tmp_path / "cache"):
            with pytest.raises(ValueError, match="public"):
                trainer.push_to_hub(private=True)
            assert set(hub.files("tester/open", "model")) == {"README.md"}
            trainer.push_to_hub()
            pushed = hub.files("tester/open", "model")
            assert "adapter_model.safetensors" in pushed and "paco_trl.json" in pushed
            with pytest.raises(ValueError, match="public"):
                trainer.push_to_hub(private=True)
            make_trainer(hub_model_id="tester/new", hub_token=TOKEN).init_hf_repo(private=True)
        assert hub.files("tester/open", "model") == pushed
        assert hub.repos["model", "tester/new"].private

    def test_all_processes_learn_what_the_first_one_is_refused(self, hub, make_trainer, tmp_path, monkeypatch):
        from paco_trl.trainer import publishing

        hub.add_repo("tester/open", {"README.md": b""})
        trainer = make_trainer(hub_model_id="tester/open", hub_token=TOKEN)
        sent = []
        monkeypatch.setattr(publishing, "gather_object", lambda values: sent.append(values) or values)
        with hub.connected(tmp_path / "cache"), pytest.raises(ValueError, match="public"):
            trainer.push_to_hub(private=True)
        # Another process gets this from the first one, and would wait for it in `save_model`
        monkeypatch.setattr(type(trainer.args), "process_index", 1)
        monkeypatch.setattr(trainer, "save_model", lambda **kwargs: pytest.fail("it saves alone"))
        monkeypatch.setattr(
            publishing, "gather_object", lambda values: sent[-1] if isinstance(values[0], tuple) else values
        )
        with pytest.raises(ValueError, match="public"):
            trainer.push_to_hub(private=True)
        # In an outage all of them save before they raise
        sent.append([("the Hub is down", True)])
        saved = []
        monkeypatch.setattr(trainer, "save_model", lambda **kwargs: saved.append(kwargs))
        with pytest.raises(ConnectionError, match="the Hub is down"):
            trainer.push_to_hub()
        assert saved

    def test_not_there_at_all(self, hub, run):
        hub.stop()
        outcome = run(prepare, "tester/adapter")
        assert outcome["error"] == "ConnectionError" and hub.url in outcome["message"]
        hub.start()
        assert run(prepare, "tester/adapter")["result"]
