"""A random rank, agent or node is killed at a random moment, again and again."""

from __future__ import annotations

import os

import pytest
from campaign import campaign

ROUNDS = int(os.environ.get("EVERYSTEP_SOAK_ROUNDS", "200"))


def held(result: dict, rounds: int) -> None:
    assert result["violations"] == [], result
    assert result["rounds"] == rounds
    assert result.get("from_memory", 0) + result.get("from_peer", 0) > rounds // 4, result


@pytest.mark.timeout(180)
def test_a_few_kills(launcher):
    """Four rounds: every restore is right, and at least what was acknowledged."""
    held(campaign(launcher, rounds=4, seed=3), 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_kills(launcher):
    """Two hundred rounds on 4 ranks and 2 nodes: always a restore, never a wrong value, nothing acknowledged is lost."""
    held(campaign(launcher, rounds=ROUNDS, seed=20), ROUNDS)
