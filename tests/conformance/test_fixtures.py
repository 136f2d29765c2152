"""The recorded outputs that travel with the repository are unchanged, accounted for, and small."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
PROVENANCE = DATA / "PROVENANCE.md"
LISTED = dict(re.findall(r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", PROVENANCE.read_text(), re.MULTILINE))
FILES = {
    str(path.relative_to(DATA / folder)): path
    for folder in ("vectors", "checkpoints")
    for path in (DATA / folder).rglob("*")
    if path.is_file()
}


def test_every_fixture_has_a_listed_origin() -> None:
    assert set(FILES) == set(LISTED)


@pytest.mark.parametrize("name", FILES)
def test_fixtures_match_their_checksums(name: str) -> None:
    assert hashlib.sha256(FILES[name].read_bytes()).hexdigest() == LISTED[name]


def test_fixtures_stay_small() -> None:
    assert sum(path.stat().st_size for path in FILES.values()) < 4 * 2**20
