"""Slurm's own options: what is wrong with those of a configuration, and the ``#SBATCH`` lines that ask for them.

Pure functions of typed values: they start no program and read no file. The forms are those of sbatch(1). Where sbatch
takes a wrong value without a word and makes something else of it, it is refused here; so is what sbatch itself refuses,
as far as that can be told without the cluster.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from launcher.decode import SECRET, encode
from launcher.errors import nearest
from launcher.nodes import show
from launcher.schema import Cluster

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR

TIME_FORMS = {
    r"(\d+)": (MINUTE,),
    r"(\d+):(\d+)": (MINUTE, 1),
    r"(\d+):(\d+):(\d+)": (HOUR, MINUTE, 1),
    r"(\d+)-(\d+)": (DAY, HOUR),
    r"(\d+)-(\d+):(\d+)": (DAY, HOUR, MINUTE),
    r"(\d+)-(\d+):(\d+):(\d+)": (DAY, HOUR, MINUTE, 1),
}
"""The documented forms of a time limit, and the seconds that each of their numbers counts."""

TIME_SLIPS = {
    r"(\d+)(-| ?d| ?days?)": "{}-0",
    r"(\d+)( ?h| ?hours?)": "{}:00:00",
    r"(\d+)( ?m| ?min| ?mins| ?minutes?)": "{}",
}
"""What other programs understand, and how sbatch writes it."""

MAX_SECONDS = 2**31 - 1
"""sbatch counts a time limit in 32 bits, and wraps around silently."""

KIB_PER_UNIT = {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}

CLOCK = r"(?:([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d)?( ?[AP]M)?|midnight|noon|fika|teatime)"
DATE = r"(?:\d{6}|\d{1,2}/\d{1,2}(/\d{2})?|\d{1,2}\.\d{1,2}(\.\d{2})?|\d{4}-\d{1,2}-\d{1,2}|today|tomorrow)"
DELAY = r"now( ?\+ ?\d+ ?((second|minute|hour|day|week)s?)?)?"
BEGIN = rf"{DELAY}|{CLOCK}( {DATE})?|{DATE}([T -]{CLOCK})?"
"""The documented forms of --begin. Whether the month has such a day is left to sbatch."""

DEPENDENCIES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok", "singleton")
JOB_ID = r"\d+(_(\d+|\*))?(\+\d+)?"

MAIL_TYPES = _words("""
    NONE BEGIN END FAIL REQUEUE ALL INVALID_DEPEND STAGE_OUT ARRAY_TASKS TIME_LIMIT TIME_LIMIT_90 TIME_LIMIT_80
    TIME_LIMIT_50
""")

GPUS = r"(?:[\w.-]+:)?(?P<count>\d+)"
GRES = r"(gres[:/])?(?P<name>[a-z_][\w-]*)(:(?P<type>[\w.-]*[a-z_][\w.-]*))?(:(?P<count>\d+)[kmgtp]?)?"

BOUNDS = {
    "cpus_per_task": (1, 65533),  # 16 bits, and the two highest numbers have a meaning of their own
    "nice": (-2147483645, 2147483645),
    "signal_lead": (1, 65535),
    "max_requeues": (0, 2**31 - 1),
    "max_parallel": (1, 2**31 - 1),
}
"""The least and the largest of a whole number. Beyond them sbatch refuses, or wraps around silently."""

ORDER = _words("""
    job_name account partition qos reservation wckey comment
    nodes ntasks_per_node cpus_per_task gpus_per_node gres mem mem_per_gpu mem_per_cpu tmp
    constraint exclusive nodelist exclude licenses
    time time_min begin dependency array nice requeue no_requeue signal
    mail_type mail_user export chdir output error open_mode
""")
"""Every option that is not an extra one, as the lines of a script stand: who, what, where, when, and the rest."""

KEYS = tuple(field.name for field in fields(Cluster) if field.name in ORDER)
"""The keys of ``cluster`` that are options of sbatch."""

STAGE_TO = re.compile(r"/|\$(\w+|\{\w+\})(/|$)")
"""An absolute path, or a variable of the node first."""

TEXTS = (*KEYS, "container_image", "container_mounts", "container_workdir", "python", "stage_to")
"""The keys of ``cluster`` that become one line, or a part of it."""

FLAGS = _words("""
    consolidate_segments contiguous hold ignore_pbs overcommit oversubscribe reboot spread_job spread_segments stepmgr
    use_min_nodes
""")
"""Further long options of sbatch, from 22.05 to 26.05, that take no value."""

MAY_TAKE_A_VALUE = _words("get_user_env no_kill oom_kill_step propagate resv_ports")
"""Those that take one or none."""

TAKE_A_VALUE = _words("""
    acctg_freq batch bb bbf cluster cluster_constraint clusters container container_id context core_spec
    cores_per_socket cpu_freq cpus_per_gpu deadline delay_boot distribution export_file extra extra_node_info gid
    gpu_bind gpu_freq gpus_per_socket gres_flags hint kill_on_invalid_dep mcs_label mem_bind mem_update mincpus
    network nodefile ntasks_per_core ntasks_per_socket ntasks_per_tres power prefer priority profile resources
    runtime segment sockets_per_node switches thread_spec threads_per_core tres_bind tres_per_task uid wait_all_nodes
""")
"""Those that need one."""

SUBMITS = "it is for those who call sbatch themselves; leave it out"
LOGS = "logs go into the run directory; leave it out"

NOT_EXTRA = (
    {name: f"it has a key of its own; set cluster.{name}" for name in KEYS}
    | dict.fromkeys(
        _words("parsable wait wrap test_only quiet verbose help usage version autocomplete external"), SUBMITS
    )
    | dict.fromkeys(_words("output error input open_mode"), LOGS)
    | {
        "job_name": "a job is called after its run; set name",
        "ntasks": "a task is a rank; set cluster.ranks_per_node",
        "ntasks_per_node": "a task is a rank; set cluster.ranks_per_node",
        "ntasks_per_gpu": "a task is a rank; set cluster.ranks_per_node",
        "tasks_per_node": "a task is a rank; set cluster.ranks_per_node",
        "gpus": "GPUs are counted on each node; set cluster.gpus_per_node",
        "gpus_per_task": "GPUs are counted on each node; set cluster.gpus_per_node",
        "array": "an array is a sweep, -m; its throttle is cluster.max_parallel",
        "signal": "it has a key of its own; set cluster.signal_lead",
        "no_requeue": "it has a key of its own; set cluster.requeue=false",
        "chdir": "a job works where it was submitted; leave it out",
    }
)
"""Options that another key or the script itself gives: why they cannot be extra ones, and what to do instead."""


def check(cluster: Cluster) -> list[str]:
    """All fault lines of a cluster of type slurm: the key, the value, the rule, the remedy."""
    values: dict[str, Any] = encode(cluster)
    faults = []
    for name in TEXTS:
        value = values[name]
        if rule := _not_one_line(value):
            faults.append(f"cluster.{name}={value!r}: {rule}")
        elif name in READERS and value is not None:
            try:
                READERS[name](value)
            except ValueError as error:
                faults.append(f"cluster.{name}={show(value)}: {error}")
    for name, (least, most) in BOUNDS.items():
        if values[name] is not None and not least <= values[name] <= most:
            near = least if values[name] < least else most
            faults.append(f"cluster.{name}={values[name]}: it must lie in [{least}, {most}]; nearest: {near}")
    return faults + _check_together(cluster) + _check_entries(cluster) + _check_extra(cluster)


def seconds(time: str | int) -> int | None:
    """The seconds of a time limit as sbatch reads it; None: no limit. A number by itself is minutes.

    Slurm grants whole minutes, and rounds up to them. Raises ValueError with the rule for what sbatch refuses, and for
    what it takes in silence and misreads.
    """
    text = str(time)
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    for form, units in TIME_FORMS.items():
        if match := _match(form, text):
            total = sum(int(number) * unit for number, unit in zip(match.groups(), units, strict=True))
            if total > MAX_SECONDS:
                raise ValueError(f"it must be at most {MAX_SECONDS // DAY} days; UNLIMITED sets no limit")
            return total or None
    near = [right.format(match[1]) for slip, right in TIME_SLIPS.items() if (match := _match(slip, text))]
    raise ValueError(
        "it must be minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
        f"days-hours:minutes:seconds or UNLIMITED{_near(near[:1])}"
    )


def mebibytes(memory: str | int) -> int:
    """The MiB of an amount of memory or disk as sbatch reads it, rounded up; 0 stands for all of a node's memory.

    Raises ValueError with the rule.
    """
    if match := _match(r"(\d+)([KMGT]?)B?", str(memory)):
        return -(-int(match[1]) * KIB_PER_UNIT[match[2].upper()] // 1024)
    near = []
    if match := _match(r"(\d+)(\.\d+)? ?([KMGT]?)(i?B)?", str(memory)):
        number, fraction, unit = match[1], match[2], match[3].upper()
        near = [f"{round(float(number + fraction) * KIB_PER_UNIT[unit] / 1024)}M" if fraction else f"{number}{unit}"]
    raise ValueError(f"it must be a whole number of MiB, or of another unit with a suffix K, M, G or T{_near(near)}")


def node_range(nodes: int | str) -> tuple[int, int]:
    """The least and the largest number of nodes. Raises ValueError with the rule."""
    match = _match(r"(\d+)(?:-(\d+))?", str(nodes))
    if match is None:
        raise ValueError("it must be a number of nodes, or a range such as 2-4")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ValueError(f"it must be at least 1{_near([f'1-{most}' if most > 1 else '1'])}")
    if most < least:
        raise ValueError(f"the first number of a range must not be above the second{_near([f'{most}-{least}'])}")
    return least, most


def num_gpus(cluster: Cluster) -> int | None:
    """GPUs on each node that ``gpus_per_node`` or ``gres`` asks for; None if neither names GPUs."""
    if cluster.gpus_per_node is not None:
        return _gpus(cluster.gpus_per_node)
    return _gres(cluster.gres) if cluster.gres is not None else None


def directives(cluster: Cluster, **own: str | int) -> list[str]:
    """The ``#SBATCH`` lines of a script: the options of a faultless ``cluster``, and the script's own.

    ``own`` holds names of ``ORDER`` (job_name, ntasks_per_node, output, ...) and wins over ``cluster``. Times and
    amounts of memory stand as the user wrote them. Raises ValueError for a value that cannot stand on such a line.
    """
    assert set(own) <= set(ORDER), sorted(set(own) - set(ORDER))
    options: dict[str, Any] = encode(cluster) | {"no_requeue": not cluster.requeue} | own
    lines = [directive(name, options.get(name)) for name in ORDER]
    lines += [directive(name, value) for name, value in cluster.extra.items()]
    return [line for line in lines if line]


def directive(name: str, value: str | int | float | bool | None) -> str:
    """One ``#SBATCH`` line; empty for an option that is not given (null, false). Raises ValueError.

    sbatch takes such a line apart by rules of its own: white space parts options, ``#`` starts a comment, both kinds of
    quotes hide these, and a backslash takes the meaning of the next character, inside either kind of quotes too.
    Nothing is expanded.
    """
    option = "#SBATCH " + (name if name.startswith("--") else f"--{name.replace('_', '-')}")
    if value is None or value is False:
        return ""
    if value is True:
        return option
    text = str(value)
    if rule := _not_one_line(text):
        raise ValueError(f"{name}={text!r}: {rule}")
    if not re.fullmatch(r"[\w.,:/@%+=-]+", text, re.ASCII):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return f"{option}={text}"


def _check_together(cluster: Cluster) -> list[str]:
    """Faults of keys that do not go with one another."""
    faults = []
    memory = [name for name in ("mem", "mem_per_gpu", "mem_per_cpu") if getattr(cluster, name) is not None]
    if len(memory) > 1:
        faults.append(f"{_together(cluster, *memory)}: only one of them can be given; set the others to null")
    if cluster.gpus_per_node is not None and _read(_gres, cluster.gres) is not None:
        faults.append(
            f"{_together(cluster, 'gpus_per_node', 'gres')}: only one of them can ask for GPUs; set the other to null"
        )
    limit, least = _read(seconds, cluster.time), _read(seconds, cluster.time_min)
    if limit is not None and least is not None and least > limit:
        faults.append(f"{_together(cluster, 'time_min', 'time')}: the first must not be above the second")
    sure = limit if least is None else least
    if sure is not None and cluster.signal_lead is not None and cluster.signal_lead >= sure:
        faults.append(
            f"cluster.signal_lead={cluster.signal_lead}: it must be below the {sure} seconds that a job may get"
        )
    if cluster.container and cluster.container_image is not None:
        faults.append(
            f"{_together(cluster, 'container', 'container_image')}: only one of them can be given; leave the other out"
        )
    faults += [
        f"cluster.{name}={show(getattr(cluster, name))}: it is for an image; set cluster.container_image too"
        for name in ("container_mounts", "container_workdir")
        if getattr(cluster, name) is not None and cluster.container_image is None
    ]
    if cluster.stage_to is not None and not STAGE_TO.match(cluster.stage_to):
        faults.append(
            f"cluster.stage_to={show(cluster.stage_to)}: it must be an absolute path, or begin with a variable of the "
            "node such as $SLURM_TMPDIR"
        )
    return faults


def _check_entries(cluster: Cluster) -> list[str]:
    """Faults of single entries of the lists and of the environment."""
    faults = []
    for name in ("setup", "container"):
        for index, text in enumerate(getattr(cluster, name)):
            if "\0" in text or (name == "container" and not text):
                faults.append(f"cluster.{name}[{index}]={text!r}: it must not be empty or hold a zero byte")
    if any(SECRET.search(word.partition("=")[0]) for word in cluster.export.split(",") if "=" in word):
        faults.append(
            "cluster.export: it holds what looks like a secret, and would be written to config.yaml; "
            "leave the value out"
        )
    for name, text in cluster.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            rule = "a variable is named by letters, digits and '_', a digit not first"
            faults.append(f"cluster.environment.{name}={show(text)}: {rule}")
        if "\0" in text:
            faults.append(f"cluster.environment.{name}={text!r}: it must not hold a zero byte")
    return faults


def _check_extra(cluster: Cluster) -> list[str]:
    faults = []
    seen: set[str] = set()
    for key, value in cluster.extra.items():
        name = key.removeprefix("--").replace("-", "_")
        rule = "it is given twice; leave one out" if name in seen else _not_extra(key, name, value)
        if rule:
            faults.append(f"cluster.extra.{key}={show(value)}: {rule}")
        seen.add(name)
    return faults


def _not_extra(key: str, name: str, value: Any) -> str:
    """Why this option cannot stand in ``extra``; empty if it can."""
    if name in NOT_EXTRA:
        return NOT_EXTRA[name]
    known = [*FLAGS, *MAY_TAKE_A_VALUE, *TAKE_A_VALUE]
    meant = [option for option in (*known, *KEYS, *NOT_EXTRA) if option.startswith(name)]
    if meant and name not in known and key.startswith("--"):
        return f"sbatch would take it for the beginning of --{meant[0].replace('_', '-')}; write the whole name"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or (name not in known and not key.startswith("--")):
        near = nearest(name, [*known, *NOT_EXTRA])
        return f"sbatch has no such option{near}; an option of a plugin of your site is written with its dashes: --NAME"
    if isinstance(value, Mapping | list):
        return "it must be text, a number, true, false or null"
    if name in TAKE_A_VALUE and value is True:
        return "this option takes a value"
    if name in FLAGS and not (value is None or isinstance(value, bool)):
        return "this option takes no value; set it to true, or leave it out"
    return _not_one_line(value)


def _not_one_line(value: Any) -> str:
    """Why this value cannot stand on one line of a script; empty if it can."""
    if value == "":
        return "it must not be empty; null leaves it out"
    if isinstance(value, str) and not value.isprintable():
        return "it must be one line of printable characters, with no white space but the blank"
    return ""


def _begin(begin: str) -> None:
    if not _match(BEGIN, begin):
        near = ["now+1hour", "16:00", "2030-01-20T12:34:00"]
        raise ValueError(f"it must be a time of the day, a date, both, or a delay; such as {', '.join(near)}")


def _dependency(dependency: str) -> None:
    if "," in dependency and "?" in dependency:
        raise ValueError("dependencies must all be met (',' between them) or any one of them ('?'), not both")
    for part in re.split("[,?]", dependency):
        if not _match(rf"singleton|{JOB_ID}|({'|'.join(DEPENDENCIES)}):{JOB_ID}(:{JOB_ID})*", part):
            kind = part.partition(":")[0].lower()
            near = "" if kind in DEPENDENCIES else nearest(kind, DEPENDENCIES)
            raise ValueError(f"it must be a list such as afterok:20:21,afterany:23, or singleton{near}")


def _mail_type(types: str) -> None:
    for word in types.split(","):
        if word.upper() not in MAIL_TYPES:
            near = nearest(word.strip().upper(), MAIL_TYPES) or f"; there are: {', '.join(MAIL_TYPES)}"
            raise ValueError(f"{word!r} is no event; write a comma and no blank between events{near}")


def _gpus(gpus: int | str) -> int:
    """All GPUs of a value of ``gpus_per_node``."""
    matches = [_match(GPUS, part) for part in str(gpus).split(",")]
    if None in matches:
        raise ValueError(
            "it must be a number, with the type of the GPU if it matters, such as 4, a100:4 or a100:2,h100:2"
        )
    return sum(int(match["count"]) for match in matches if match)


def _gres(gres: str) -> int | None:
    """The GPUs in a value of ``gres``; None if none are named."""
    found = [_match(GRES, part) for part in gres.split(",")]
    if None in found or gres.lower() == "help":
        raise ValueError("it must be a list of name, name:count or name:type:count, such as gpu:a100:4")
    counts = [int(match["count"] or 1) for match in found if match and match["name"].lower() == "gpu"]
    return sum(counts) if counts else None


def _match(pattern: str, text: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)


def _near(values: list[str]) -> str:
    return f"; nearest: {', '.join(values)}" if values else ""


def _read(reader: Callable[[Any], T], value: Any) -> T | None:
    """What a value stands for; None for one that is not given, or has a fault of its own."""
    try:
        return None if value is None else reader(value)
    except ValueError:
        return None


def _together(cluster: Cluster, *names: str) -> str:
    return ", ".join(f"cluster.{name}={show(encode(getattr(cluster, name)))}" for name in names)


READERS: dict[str, Callable[[Any], object]] = {
    "nodes": node_range,
    "gpus_per_node": _gpus,
    "gres": _gres,
    "mem": mebibytes,
    "mem_per_gpu": mebibytes,
    "mem_per_cpu": mebibytes,
    "tmp": mebibytes,
    "time": seconds,
    "time_min": seconds,
    "begin": _begin,
    "dependency": _dependency,
    "mail_type": _mail_type,
}
"""Who understands a value, and raises ValueError for one that has no meaning. The rest only the cluster can judge."""
