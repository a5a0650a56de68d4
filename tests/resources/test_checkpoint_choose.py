"""Which checkpoint is restored, deleted, uploaded: decided from lists, the same on every host."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.resources.checkpoint.choose import Candidate, doomed, next_upload, order
from jaxfound.resources.checkpoint.manifest import Key

KEYS = st.builds(Key, st.integers(0, 6), st.sampled_from(["a", "b"]))
KEY_SETS = st.frozensets(KEYS, max_size=8)
STEPS = st.frozensets(st.integers(0, 30), max_size=12)

A, B = Key(8, "a"), Key(8, "b")


def names(candidates):
    return [(c.key.step, c.key.attempt, c.tier) for c in candidates]


def test_the_newest_step_comes_first_and_of_one_step_the_nearest_tier():
    old = Key(6, "a")
    found = order(local=[{A, old}, {A, old}], shared={A, old}, remote={Key(10, "a"), Key(2, "a")})
    assert names(found) == [
        (10, "a", "remote"),
        (8, "a", "local"),
        (8, "a", "shared"),
        (6, "a", "local"),
        (6, "a", "shared"),
        (2, "a", "remote"),
    ]


def test_a_step_that_one_host_has_not_is_no_local_candidate():
    assert names(order(local=[{A, Key(6, "a")}, {Key(6, "a")}], shared=set())) == [
        (6, "a", "local")
    ]


def test_parts_of_two_attempts_at_one_step_are_never_put_together():
    assert order(local=[{A}, {B}], shared=set()) == ()


@given(st.lists(KEY_SETS, min_size=1, max_size=4), KEY_SETS, KEY_SETS)
def test_candidates_are_whole_somewhere_newest_first_and_named_once(local, shared, remote):
    found = order(local=local, shared=shared, remote=remote)
    assert len(set(found)) == len(found)
    assert [c.key.step for c in found] == sorted((c.key.step for c in found), reverse=True)
    for key, tier in found:
        there = {"local": all(key in host for host in local), "shared": key in shared}
        assert there.get(tier, key in remote)
    everywhere = frozenset.intersection(*local) | shared | remote
    assert {c.key for c in found} == everywhere
    shuffled = order(local=local[::-1], shared=sorted(shared), remote=sorted(remote)[::-1])
    assert shuffled == found, "hosts that list in another order choose the same"


@given(STEPS, st.integers(0, 5), STEPS)
def test_the_newest_and_the_newest_intact_step_are_never_deleted(committed, keep, damaged):
    gone = set(doomed(committed, keep=keep, damaged=damaged))
    assert gone <= committed
    left = committed - gone
    if committed:
        assert max(committed) in left
    if committed - damaged:
        assert max(committed - damaged) in left
    if keep:
        assert len(left - damaged) <= max(keep, 1)
        intact = sorted(committed - damaged)
        assert set(intact[-keep:]) <= left
    else:
        assert not gone, "0 keeps all"


def test_a_negative_keep_deletes_nothing():
    with pytest.raises(ValueError, match="keep=-1"):
        doomed([1, 2], keep=-1)


def test_a_damaged_step_is_not_counted_as_kept():
    assert doomed([2, 4, 6], keep=1, damaged={6}) == [2]


def test_a_host_joins_the_save_that_another_has_begun():
    assert next_upload([Key(6, "a"), A], committed=[], begun=[Key(6, "a")]) == Key(6, "a")
    assert next_upload([Key(6, "a"), A], committed=[], begun=[]) == A


def test_what_is_older_than_a_committed_step_is_not_uploaded_any_more():
    assert next_upload([Key(6, "a")], committed=[A], begun=[Key(6, "a")]) is None
    assert next_upload([A], committed=[A], begun=[]) is None


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
)
def test_hosts_that_work_at_any_pace_come_to_commit_the_newest_step(saves, pace):
    """Three hosts save the same steps and upload in an order that `pace` gives."""
    steps = [Key(step, "a") for step in sorted(saves)]
    there: dict[Key, set[int]] = {}
    committed: set[Key] = set()

    def work(host: int, known: int) -> bool:
        parts = [key for key in steps[:known] if host not in there.get(key, set())]
        key = next_upload(parts, committed=committed, begun=there)
        if key is None:
            return False
        there.setdefault(key, set()).add(host)
        if len(there[key]) == 3:
            committed.add(key)
            for old in [k for k in there if k.step <= key.step]:
                del there[old]
        return True

    for turn, host in enumerate(pace):
        work(host, 1 + turn % len(steps))
    while sum(work(host, len(steps)) for host in range(3)):
        pass
    assert max(committed) == steps[-1]


def test_a_candidate_is_named_by_step_and_tier():
    assert Candidate(A, "shared").name == "step 8 (shared)"
