"""When gradients are communicated, and what one optimizer step sends over the network."""

from launcher.schema import Config, Sync


def sync(config: Config) -> Sync:
    """``accumulation.sync``, or what is better at the ZeRO stage.

    Stages 0 and 1 keep a rank's gradients whole in any case, so one reduction a window costs nothing. Stages 2 and 3
    are chosen to keep only a partition of them, which needs a reduction after every micro-batch.
    """
    if config.accumulation.sync is not None:
        return config.accumulation.sync
    return Sync.ONCE_PER_WINDOW if config.zero.stage < 2 else Sync.EVERY_MICRO_BATCH
