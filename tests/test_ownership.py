# SPDX-License-Identifier: Apache-2.0
"""What belongs to the user: nothing is removed, overwritten or read that is not the package's own."""

import os
import stat

import pytest

from paco_trl.utils.files import write_atomically


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_permissions_are_those_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new.txt", "1")
        (tmp_path / "plain.txt").write_text("1")
        (tmp_path / "secret.txt").touch(0o600)
        write_atomically(tmp_path / "secret.txt", "2")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["new.txt"] == modes["plain.txt"] == 0o666 & ~umask
    assert modes["secret.txt"] == 0o600 and (tmp_path / "secret.txt").read_text() == "2"
