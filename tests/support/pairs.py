"""Pairs of answers for tests; learner actors import them."""

from collections.abc import Iterator

Messages = list[dict[str, str]]


def polite(first: int = 0, count: int = 32) -> Iterator[tuple[Messages, str, str]]:
    """A polite and a rude answer to questions that differ in a number: trivially separable."""
    for number in range(first, first + count):
        prompt = [{"role": "user", "content": f"Say {number}"}]
        yield prompt, f"please {number % 10}", f"never {number * 7 % 10}"


def mixed() -> Iterator[tuple[Messages, str, str]]:
    """Six pairs of use, one that is too long and one that is no pair."""
    yield from polite(count=6)
    yield [{"role": "user", "content": "Say all"}], "1 2 3 4 5 6 7 8 9 " * 9, "never"
    yield [{"role": "user", "content": "Say both"}], "same", "same"
