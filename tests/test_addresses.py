# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers: one, without a secret."""

import pytest

from paco_trl.dataset_building import ChatEndpoint
from paco_trl.rewards import ConsistencyReward, ServedJudge
from paco_trl.utils.addresses import check_base_url


@pytest.mark.parametrize(
    "addresses",
    [
        "http://a:8000/v1,http://b:8000/v1",
        "http://a:8000/v1, b:8000",
        "http://a:8000/v1 http://b:8000/v1",
        ["http://a:8000/v1", "http://b:8000/v1"],
    ],
)
@pytest.mark.parametrize("client", [ServedJudge, ChatEndpoint, lambda url, name: ConsistencyReward(name, url)])
def test_several_are_refused(client, addresses):
    with pytest.raises(ValueError, match="--data-parallel-size") as error:
        client(addresses, "judge")
    assert repr(addresses) in str(error.value)


def test_one_is_taken():
    assert check_base_url("https://judge-1.example:8000/a_path/v1") == "judge-1.example"
    assert check_base_url("http://[::1]:8000/v1") == "::1"
