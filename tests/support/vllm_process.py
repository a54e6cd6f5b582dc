"""The process that vLLM starts below whoever uses it."""

from pathlib import Path


def engine_process_below(parent: int) -> int:
    """Id of the one child of `parent` that vLLM has named so."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        if name.startswith("VLLM") and int(rest.split()[1]) == parent:
            found.append(int(status.parent.name))
    assert len(found) == 1, found
    return found[0]
