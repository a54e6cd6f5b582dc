"""When an actor looks for cyclic garbage: seldom, and never among what it loaded at its start."""

import gc

_NEW_OBJECTS = 20_000


def collect_rarely() -> None:
    """Call once an actor has loaded all it needs.

    Episodes make hundreds of short-lived objects each and hardly a cycle. With Python's defaults
    (a look every 700 objects, again and again through the modules of a tokenizer or torch) looking
    took a quarter of an agent actor's CPU time. What is frozen here stays until the process ends.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
