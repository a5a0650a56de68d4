"""What can never be served is refused with the reason and the figures."""

import pytest

from jaxfound.config.serve import ServeConfig
from jaxfound.serving.admission import AdmissionError
from jaxfound.serving.request import Request
from jaxfound.serving.scheduler import Scheduler


def scheduler(**keys) -> Scheduler:
    cfg = ServeConfig(page_size=4, max_rows=2, token_budget=8, **keys)
    return Scheduler(cfg, num_pages=8, max_length=40)


def request(name: str, length: int, max_tokens: int) -> Request:
    return Request(name, tuple(range(length)), max_tokens)


REFUSED = [
    (0, 4, "empty", 0, 1, "both must be at least 1"),
    (4, 0, "empty", 0, 1, "both must be at least 1"),
    (30, 11, "too_long", 41, 40, "the sum, 41, must be at most 40. Use max_tokens up to 10"),
    (41, 1, "too_long", 42, 40, "Use a prompt of at most 39 tokens"),
    (30, 4, "too_many_pages", 9, 8, "takes 9 pages of 4 tokens, and the cache has 8. "
     "Use max_tokens up to 3, or raise serve.num_pages"),
    (34, 1, "too_many_pages", 9, 8, "Use a prompt of at most 32 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("length", "max_tokens", "reason", "asked", "limit", "text"), REFUSED)
def test_a_request_that_can_never_finish_is_refused(length, max_tokens, reason, asked, limit, text):
    with pytest.raises(AdmissionError) as refused:
        scheduler().add(request("a", length, max_tokens))
    assert (refused.value.reason, refused.value.asked, refused.value.limit) == (
        reason,
        asked,
        limit,
    )
    assert text in str(refused.value)


@pytest.mark.parametrize(("length", "max_tokens"), [(30, 3), (32, 1), (1, 32)])
def test_what_the_messages_offer_is_taken(length, max_tokens):
    scheduler().add(request("a", length, max_tokens))


def test_more_than_may_wait_are_refused():
    s = scheduler(max_waiting=1)
    for number in range(3):
        s.add(request(str(number), 4, 1))
    with pytest.raises(AdmissionError, match="3 requests wait") as refused:
        s.add(request("late", 4, 1))
    assert (refused.value.reason, refused.value.limit) == ("queue_full", 1)
    s.schedule()
    # Two have rows now, one waits.
    assert len(s.waiting) == 1
    with pytest.raises(AdmissionError):
        s.add(request("late", 4, 1))


def test_two_requests_of_one_id_are_refused():
    s = scheduler()
    s.add(request("a", 4, 1))
    with pytest.raises(ValueError, match="'a' is there already"):
        s.add(request("a", 4, 1))
