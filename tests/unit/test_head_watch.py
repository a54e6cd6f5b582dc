"""When Ray's head counts as gone: once it was asked in vain for so long."""

import asyncio
from collections.abc import Iterator, Sequence

from areal_ray.runtime.head_watch import HeadNews, HeadWatch

PATIENCE_S = 30.0


def looks(
    found: Sequence[tuple[float, float, bool]], patience_s: float = PATIENCE_S
) -> list[HeadNews]:
    """News of looks that begin, end and are answered so; the watch is made at 0."""
    times: Iterator[float] = iter([0.0, *(at for look in found for at in look[:2])])
    answers = iter([is_answered for *_, is_answered in found])

    async def answer() -> bool:
        return next(answers)

    async def all_looks() -> list[HeadNews]:
        watch = HeadWatch(patience_s, answer, lambda: next(times))
        return [await watch.look() for _ in found]

    return asyncio.run(all_looks())


def silent(begin: int, end: int) -> list[tuple[float, float, bool]]:
    return [(float(at), at + 3.0, False) for at in range(begin, end, 4)]


def test_a_head_that_is_asked_in_vain_is_told_and_then_gone():
    first, told, *waited, last = looks([(1.0, 1.0, True), *silent(2, 32)])
    assert (first, told) == (HeadNews(), HeadNews())
    assert [news.event for news in waited if news.event] == ["Ray's head has not answered for 8 s"]
    assert not any(news.gone for news in waited)
    assert last.gone.startswith("Ray's head has not answered for 32 s.")


def test_one_that_answers_again_begins_anew():
    news = looks([*silent(1, 20), (21.0, 21.0, True), *silent(22, 48)])
    assert [one.event for one in news if one.event][1] == "Ray's head answers again"
    assert not any(one.gone for one in news)


def test_time_in_which_nobody_asked_is_no_silence():
    """Between the making of the watch and the first look actors load; a driver can be suspended."""
    assert not any(news.gone for news in looks(silent(600, 620)))
    assert looks(silent(600, 630))[-1].gone
    suspended = [(1.0, 1.0, True), (900.0, 903.0, False), (904.0, 904.0, True)]
    assert not any(news.gone for news in looks(suspended))


def test_a_look_during_which_this_process_stood_still_proves_nothing():
    assert not any(news.gone for news in looks([(1.0, 600.0, False), (601.0, 601.0, True)]))
    assert looks([(1.0, 600.0, False), (601.0, 604.0, False)])[-1].gone
