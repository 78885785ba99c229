"""What a run takes beside time: memory of a rank by kind and traffic of a step, as the plan shows them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from launcher import noise_scale, traffic
from launcher.batch import Cut
from launcher.parameters import Sizes
from launcher.schema import Config, Sync


def facts(config: Config, cut: Cut, sizes: Sizes | None) -> dict[str, Any]:
    """The part of ``plan.json`` that depends on the size of the model; without it figures are None.

    ``alternative``: what the other setting of ``accumulation.sync`` would take, where there is a choice.
    """
    chosen = traffic.sync(config)
    others = [other for other in Sync if other is not chosen and not traffic.check(_with(config, other))]
    taken = [_taken(config, cut, sizes, choice) for choice in (chosen, *others)]
    return {
        "num_parameters": sizes.total if sizes else None,
        **taken[0],
        "alternative": taken[1] if taken[1:] else None,
        "noise_scale": {"measured": (reason := noise_scale.unavailable(config)) is None, "reason": reason},
    }


def _with(config: Config, choice: Sync) -> Config:
    return replace(config, accumulation=replace(config.accumulation, sync=choice))


def _taken(config: Config, cut: Cut, sizes: Sizes | None, choice: Sync) -> dict[str, Any]:
    config = _with(config, choice)
    if sizes is None:
        return {"sync": choice.value, "memory": None, "traffic": None}
    step = traffic.per_step(config, sizes, cut.gradient_accumulation_steps)
    kinds = {"gradients": step.gradients, "parameters": step.parameters}
    return {
        "sync": choice.value,
        "memory": traffic.memory(config, sizes, cut.data_parallel_size),
        "traffic": {
            **{kind: asdict(one) if one else None for kind, one in kinds.items()},
            "sent_bytes": sum(one.sent(cut.data_parallel_size) for one in kinds.values() if one),
        },
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for a person."""
    if found["memory"] is None:
        yield "memory         (checked in the job)"
        yield "traffic        (checked in the job)"
    else:
        known = {kind.replace("_", " "): size for kind, size in found["memory"].items() if size}
        kinds = ", ".join(f"{kind} {_size(size)}" for kind, size in known.items())
        yield (
            f"memory         {_size(sum(known.values()))} a rank for {found['num_parameters']:,} parameters, and "
            f"activations: {kinds}"
        )
        yield f"traffic        {_traffic(found)}"
        if other := found["alternative"]:
            gradients, sent = other["memory"]["gradients"], other["traffic"]["sent_bytes"]
            yield (
                f"               accumulation.sync={other['sync']} would take {_size(gradients)} for gradients, and "
                f"{_size(sent)} of traffic"
            )
    if not found["noise_scale"]["measured"]:
        yield f"noise scale    not measured: {found['noise_scale']['reason']}"


def _traffic(found: Mapping[str, Any]) -> str:
    parts = []
    for kind in ("gradients", "parameters"):
        one = found["traffic"][kind]
        if one is not None:
            times = "" if one["calls"] is None else f" in {one['calls']:,} call{'s' * (one['calls'] != 1)}"
            parts.append(f"{one['operation']} of {_size(one['bytes'])} of {kind}{times}")
    sent = f"{_size(found['traffic']['sent_bytes'])} sent a rank and step, {found['sync']}"
    return f"{sent}: {', '.join(parts)}"


def _size(number: int) -> str:
    """Bytes for a person, in powers of 1000."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"
