"""What can go wrong, one flat type for each boundary crossed.

Every message reads *where: what is, what must be. What to do.* A command that ends with one of
these prints that message and exits with `exit_code`; anything else is a defect of ours.
"""


class ArealRayError(Exception):
    """Root of the errors a caller is expected to act on."""

    exit_code = 1


class RecipeError(ArealRayError):
    """The recipe, an override or a file it names is wrong; nothing was started."""

    exit_code = 2


class DataError(ArealRayError):
    """A data set, one of its rows or a checkpoint cannot be used; names the file and the row."""

    exit_code = 2


class PlacementError(ArealRayError):
    """The cluster cannot hold the layout; names demand, supply and the key to change."""

    exit_code = 2


class EngineError(ArealRayError):
    """An engine could not load, sample or train; names the engine and the request."""


class RequestRefused(EngineError):
    """An engine cannot serve a request as it is asked, and no other of the fleet can."""


class EngineDied(EngineError):
    """A process of the engine's own died, or holds parts of two versions: another has to be started
    in its place."""


class ActorLost(ArealRayError):
    """A Ray actor died and the run cannot go on without it; names the actor and the cause."""


class ActorGone(ActorLost):
    """An actor died and Ray starts it no more: its constructor raised, or it was not to be."""


class DeadlineExceeded(ArealRayError):
    """A wait outlived its deadline; says what was waited for and who owed it."""


class StorageError(ArealRayError):
    """A file of the run could not be written: a full disk, a folder that went away; names it."""


class PublishError(ArealRayError):
    """New weights did not reach the fleet; the committed version is unchanged."""


class PromotionRefused(ArealRayError):
    """What a step made broke a bound of the recipe, and the run does not go on without it."""


class TooManyFailures(ArealRayError):
    """Too many episodes ended without a usable result; names the most frequent reason."""
