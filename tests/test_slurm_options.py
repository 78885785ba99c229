"""Slurm's options as typed values: what they mean, what is refused, and the lines that ask for them."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import decode, slurm_options, validate
from launcher.errors import RequestError
from launcher.schema import Call, Cluster, ClusterType, Config, Data, Exclusive

SLURM = Cluster(type=ClusterType.SLURM)

TIMES: dict[str | int, int | None] = {
    90: 90 * 60,
    "90": 90 * 60,
    "0090": 90 * 60,
    "1:30": 90,
    "12:00": 12 * 60,
    "0:59": 59,
    "1:30:00": 90 * 60,
    "4:00:00": 4 * 3600,
    "0:0:1": 1,
    "99:99:99": 99 * 3600 + 99 * 60 + 99,
    "1-0": 86400,
    "1-12": 36 * 3600,
    "7-00:30": 7 * 86400 + 30 * 60,
    "1-12:30:30": 36 * 3600 + 30 * 60 + 30,
    0: None,
    "0": None,
    "00:00:00": None,
    -1: None,
    "UNLIMITED": None,
    "infinite": None,
}
"""The documented forms of a time limit, and their seconds; None: no limit."""

MEMORY: dict[str | int, int] = {
    16000: 16000,
    "16000": 16000,
    "100M": 100,
    "100m": 100,
    "8G": 8192,
    "8g": 8192,
    "8GB": 8192,
    "1T": 1024**2,
    "1024K": 1,
    "1025K": 2,
    "1000000k": 977,
    0: 0,
    "0": 0,
}
"""Forms of an amount of memory, and their MiB."""

BEGINS = [
    "16:00",
    "9:30",
    "16:00:30",
    "4:00PM",
    "4:00:10am",
    "midnight",
    "noon",
    "fika",
    "teatime",
    "now",
    "now+60",
    "now+1hour",
    "now+5minutes",
    "now+2days",
    "now+1week",
    "today",
    "tomorrow",
    "010130",
    "01/20/30",
    "01/20",
    "01.20.30",
    "2030-01-20",
    "2030-01-20T12:34",
    "2030-01-20T12:34:00",
]

DEPENDENCIES = [
    "afterok:20",
    "afterok:20:21,afterany:23",
    "afterok:20:21?afterany:23",
    "after:20+5",
    "after:20+5:21",
    "afternotok:20_3",
    "aftercorr:20_*",
    "afterburstbuffer:20",
    "singleton",
    "singleton,afterok:20",
    "20",
    "20,21",
    "AFTEROK:20",
]


def check(**changes: Any) -> list[str]:
    return slurm_options.check(replace(SLURM, **changes))


def test_the_defaults_have_no_fault() -> None:
    assert check() == []


@pytest.mark.parametrize(("time", "expected"), TIMES.items())
def test_every_documented_form_of_a_time_limit(time: str | int, expected: int | None) -> None:
    assert slurm_options.seconds(time) == expected
    assert check(time=time) == []


number = st.integers(0, 200)


@given(days=number, hours=number, minutes=number, seconds=number)
def test_a_time_limit_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert slurm_options.seconds(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == (whole or None)
    assert slurm_options.seconds(f"{days * 24 + hours}:{minutes}:{seconds}") == (whole or None)
    assert slurm_options.seconds(f"{(days * 24 + hours) * 60 + minutes}:{seconds}") == (whole or None)


@pytest.mark.parametrize(("memory", "expected"), MEMORY.items())
def test_every_form_of_an_amount_of_memory(memory: str | int, expected: int) -> None:
    assert slurm_options.mebibytes(memory) == expected
    for key in ("mem", "mem_per_gpu", "mem_per_cpu", "tmp"):
        assert check(**{key: memory}) == []


@given(st.integers(0, 10**9), st.sampled_from("KMGT"))
def test_a_suffix_is_a_power_of_1024_and_parts_of_a_mebibyte_count_whole(size: int, unit: str) -> None:
    num_bytes = size * 1024 ** ("KMGT".index(unit) + 1)
    whole, rest = divmod(num_bytes, 1024**2)
    assert slurm_options.mebibytes(f"{size}{unit}") == whole + (rest > 0)


@pytest.mark.parametrize("begin", BEGINS)
def test_every_documented_form_of_a_beginning(begin: str) -> None:
    assert check(begin=begin) == []


@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_every_documented_form_of_a_dependency(dependency: str) -> None:
    assert check(dependency=dependency) == []


@pytest.mark.parametrize(
    ("nodes", "expected"), [(1, (1, 1)), (4, (4, 4)), ("4", (4, 4)), ("2-4", (2, 4)), ("3-3", (3, 3))]
)
def test_nodes_are_a_number_or_a_range(nodes: int | str, expected: tuple[int, int]) -> None:
    assert slurm_options.node_range(nodes) == expected
    assert check(nodes=nodes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_node": "4"}, 4),
        ({"gpus_per_node": "a100:4"}, 4),
        ({"gpus_per_node": "a100:4,h100:2"}, 6),
        ({"gpus_per_node": 0}, 0),
        ({"gres": "gpu:4"}, 4),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:a100"}, 1),
        ({"gres": "gpu:a100_3g.20gb:2,shard:3"}, 2),
        ({"gres": "gres:gpu:2"}, 2),
        ({"gres": "craynetwork:0"}, None),
        ({"gres": "none"}, None),
    ],
)
def test_gpus_of_a_node_are_counted_in_either_option(changes: dict[str, Any], expected: int | None) -> None:
    assert check(**changes) == []
    assert slurm_options.num_gpus(replace(SLURM, **changes)) == expected


TIME_RULE = (
    "it must be minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
    "days-hours:minutes:seconds or UNLIMITED"
)
MEMORY_RULE = "it must be a whole number of MiB, or of another unit with a suffix K, M, G or T"
ONE_LINE = "it must be one line of printable characters, with no white space but the blank"
DEPENDENCY_RULE = "it must be a list such as afterok:20:21,afterany:23, or singleton"
PLUGIN = "an option of a plugin of your site is written with its dashes: --NAME"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # time
        ({"time": "two days"}, f"cluster.time=two days: {TIME_RULE}"),
        ({"time": "2h"}, f"cluster.time=2h: {TIME_RULE}; nearest: 2:00:00"),
        ({"time": "90 min"}, f"cluster.time=90 min: {TIME_RULE}; nearest: 90"),
        ({"time": "3 days"}, f"cluster.time=3 days: {TIME_RULE}; nearest: 3-0"),
        ({"time": "3-"}, f"cluster.time=3-: {TIME_RULE}; nearest: 3-0"),
        ({"time": -5}, f"cluster.time=-5: {TIME_RULE}"),
        ({"time": "1-2-3"}, f"cluster.time=1-2-3: {TIME_RULE}"),
        ({"time": "1:2:3:4"}, f"cluster.time=1:2:3:4: {TIME_RULE}"),
        ({"time": "1.5"}, f"cluster.time=1.5: {TIME_RULE}"),
        ({"time": " 5"}, f"cluster.time= 5: {TIME_RULE}"),
        ({"time": "٣"}, f"cluster.time=٣: {TIME_RULE}"),
        ({"time": "30000-0"}, "cluster.time=30000-0: it must be at most 24855 days; UNLIMITED sets no limit"),
        ({"time_min": "x"}, f"cluster.time_min=x: {TIME_RULE}"),
        (
            {"time": "1:00:00", "time_min": 90},
            "cluster.time_min=90, cluster.time=1:00:00: the first must not be above the second",
        ),
        # memory
        ({"mem": "1.5G"}, f"cluster.mem=1.5G: {MEMORY_RULE}; nearest: 1536M"),
        ({"mem": "8GiB"}, f"cluster.mem=8GiB: {MEMORY_RULE}; nearest: 8G"),
        ({"mem": "8 GB"}, f"cluster.mem=8 GB: {MEMORY_RULE}; nearest: 8G"),
        ({"mem": "8P"}, f"cluster.mem=8P: {MEMORY_RULE}"),
        ({"mem": -1}, f"cluster.mem=-1: {MEMORY_RULE}"),
        ({"mem_per_gpu": "all"}, f"cluster.mem_per_gpu=all: {MEMORY_RULE}"),
        ({"tmp": "x"}, f"cluster.tmp=x: {MEMORY_RULE}"),
        (
            {"mem": "8G", "mem_per_cpu": 100},
            "cluster.mem=8G, cluster.mem_per_cpu=100: only one of them can be given; set the others to null",
        ),
        # nodes, GPUs and cores
        ({"nodes": 0}, "cluster.nodes=0: it must be at least 1; nearest: 1"),
        ({"nodes": "0-4"}, "cluster.nodes=0-4: it must be at least 1; nearest: 1-4"),
        (
            {"nodes": "4-2"},
            "cluster.nodes=4-2: the first number of a range must not be above the second; nearest: 2-4",
        ),
        ({"nodes": "2,4"}, "cluster.nodes=2,4: it must be a number of nodes, or a range such as 2-4"),
        (
            {"gpus_per_node": "a100"},
            "cluster.gpus_per_node=a100: it must be a number, with the type of the GPU if it matters, such as 4, "
            "a100:4 or a100:2,h100:2",
        ),
        (
            {"gres": "gpu: 4"},
            "cluster.gres=gpu: 4: it must be a list of name, name:count or name:type:count, such as gpu:a100:4",
        ),
        (
            {"gres": "help"},
            "cluster.gres=help: it must be a list of name, name:count or name:type:count, such as gpu:a100:4",
        ),
        (
            {"gpus_per_node": 4, "gres": "gpu:4"},
            "cluster.gpus_per_node=4, cluster.gres=gpu:4: only one of them can ask for GPUs; set the other to null",
        ),
        ({"cpus_per_task": 0}, "cluster.cpus_per_task=0: it must lie in [1, 65533]; nearest: 1"),
        ({"cpus_per_task": 65536}, "cluster.cpus_per_task=65536: it must lie in [1, 65533]; nearest: 65533"),
        # when, and again
        (
            {"begin": "4pm"},
            "cluster.begin=4pm: it must be a time of the day, a date, both, or a delay; such as now+1hour, 16:00, "
            "2030-01-20T12:34:00",
        ),
        (
            {"dependency": "afterk:20"},
            f"cluster.dependency=afterk:20: {DEPENDENCY_RULE}; nearest: afterok, after, afternotok",
        ),
        ({"dependency": "afterok:"}, f"cluster.dependency=afterok:: {DEPENDENCY_RULE}"),
        ({"dependency": "afterok:20, 21"}, f"cluster.dependency=afterok:20, 21: {DEPENDENCY_RULE}"),
        (
            {"dependency": "afterok:20,afterok:21?afterok:22"},
            "cluster.dependency=afterok:20,afterok:21?afterok:22: dependencies must all be met (',' between them) or "
            "any one of them ('?'), not both",
        ),
        (
            {"mail_type": "END, FAIL"},
            "cluster.mail_type=END, FAIL: ' FAIL' is no event; write a comma and no blank between events; nearest: "
            "FAIL",
        ),
        (
            {"mail_type": "FINISHED"},
            "cluster.mail_type=FINISHED: 'FINISHED' is no event; write a comma and no blank between events; there are: "
            "NONE, BEGIN, END, FAIL, REQUEUE, ALL, INVALID_DEPEND, STAGE_OUT, ARRAY_TASKS, TIME_LIMIT, TIME_LIMIT_90, "
            "TIME_LIMIT_80, TIME_LIMIT_50",
        ),
        ({"nice": 2**31}, "cluster.nice=2147483648: it must lie in [-2147483645, 2147483645]; nearest: 2147483645"),
        ({"signal_lead": 0}, "cluster.signal_lead=0: it must lie in [1, 65535]; nearest: 1"),
        ({"signal_lead": 65536}, "cluster.signal_lead=65536: it must lie in [1, 65535]; nearest: 65535"),
        (
            {"signal_lead": 600, "time": 10},
            "cluster.signal_lead=600: it must be below the 600 seconds that a job may get",
        ),
        (
            {"signal_lead": 600, "time": 60, "time_min": 5},
            "cluster.signal_lead=600: it must be below the 300 seconds that a job may get",
        ),
        ({"max_requeues": -1}, "cluster.max_requeues=-1: it must lie in [0, 2147483647]; nearest: 0"),
        ({"max_parallel": 0}, "cluster.max_parallel=0: it must lie in [1, 2147483647]; nearest: 1"),
        # text
        ({"partition": ""}, "cluster.partition='': it must not be empty; null leaves it out"),
        ({"comment": "a\n#SBATCH --hold"}, f"cluster.comment='a\\n#SBATCH --hold': {ONE_LINE}"),
        ({"account": "a\0b"}, f"cluster.account='a\\x00b': {ONE_LINE}"),
        ({"qos": "a\u00a0"}, f"cluster.qos='a\\xa0': {ONE_LINE}"),
        ({"comment": "\udcff"}, f"cluster.comment='\\udcff': {ONE_LINE}"),
        ({"time": "1:00\n"}, f"cluster.time='1:00\\n': {ONE_LINE}"),
        ({"stage_to": "/a\tb"}, f"cluster.stage_to='/a\\tb': {ONE_LINE}"),
        (
            {"stage_to": "tmp"},
            "cluster.stage_to=tmp: it must be an absolute path, or begin with a variable of the node such as "
            "$SLURM_TMPDIR",
        ),
        (
            {"stage_to": "$(pwd)/x"},
            "cluster.stage_to=$(pwd)/x: it must be an absolute path, or begin with a variable of the node such as "
            "$SLURM_TMPDIR",
        ),
        # containers, environment
        (
            {"container": ["apptainer", "exec"], "container_image": "x"},
            "cluster.container=[apptainer,exec], cluster.container_image=x: only one of them can be given; leave the "
            "other out",
        ),
        (
            {"container_mounts": "/a:/b"},
            "cluster.container_mounts=/a:/b: it is for an image; set cluster.container_image too",
        ),
        ({"container": ["a", ""]}, "cluster.container[1]='': it must not be empty or hold a zero byte"),
        ({"setup": ["a\0b"]}, "cluster.setup[0]='a\\x00b': it must not be empty or hold a zero byte"),
        (
            {"environment": {"A-B": "1"}},
            "cluster.environment.A-B=1: a variable is named by letters, digits and '_', a digit not first",
        ),
        ({"environment": {"A": "\0"}}, "cluster.environment.A='\\x00': it must not hold a zero byte"),
        (
            {"export": "ALL,WANDB_API_KEY=hunter2"},
            "cluster.export: it holds what looks like a secret, and would be written to config.yaml; leave the value "
            "out",
        ),
        # further options
        ({"extra": {"time": 5}}, "cluster.extra.time=5: it has a key of its own; set cluster.time"),
        (
            {"extra": {"gpus-per-node": 5}},
            "cluster.extra.gpus-per-node=5: it has a key of its own; set cluster.gpus_per_node",
        ),
        ({"extra": {"job_name": "x"}}, "cluster.extra.job_name=x: a job is called after its run; set name"),
        ({"extra": {"ntasks": 4}}, "cluster.extra.ntasks=4: a task is a rank; set cluster.ranks_per_node"),
        (
            {"extra": {"array": "0-3"}},
            "cluster.extra.array=0-3: an array is a sweep, -m; its throttle is cluster.max_parallel",
        ),
        (
            {"extra": {"--arra": "0-3"}},
            "cluster.extra.--arra=0-3: sbatch would take it for the beginning of --array; write the whole name",
        ),
        (
            {"extra": {"output": "x"}},
            "cluster.extra.output=x: logs go into the run directory; leave it out",
        ),
        (
            {"extra": {"wait": True}},
            "cluster.extra.wait=true: it is for those who call sbatch themselves; leave it out",
        ),
        ({"extra": {"--time": 5}}, "cluster.extra.--time=5: it has a key of its own; set cluster.time"),
        (
            {"extra": {"gpu_bnd": "none"}},
            f"cluster.extra.gpu_bnd=none: sbatch has no such option; nearest: gpu_bind, gpus_per_node; {PLUGIN}",
        ),
        ({"extra": {"hint": True}}, "cluster.extra.hint=true: this option takes a value"),
        (
            {"extra": {"contiguous": 5}},
            "cluster.extra.contiguous=5: this option takes no value; set it to true, or leave it out",
        ),
        ({"extra": {"hint": ["a"]}}, "cluster.extra.hint=[a]: it must be text, a number, true, false or null"),
        ({"extra": {"hint": "a\nb"}}, f"cluster.extra.hint=a\\nb: {ONE_LINE}"),
        (
            {"extra": {"gpu_bind": "none", "gpu-bind": "closest"}},
            "cluster.extra.gpu-bind=closest: it is given twice; leave one out",
        ),
        ({"extra": {"--x y": 1}}, f"cluster.extra.--x y=1: sbatch has no such option; {PLUGIN}"),
    ],
)
def test_a_fault_is_one_line_with_its_remedy(changes: dict[str, Any], line: str) -> None:
    assert check(**changes) == [line]


def test_all_faults_are_told_at_once() -> None:
    found = check(time="x", mem="y", mem_per_cpu="1G", nice=2**40, setup=["\0"], extra={"tme": 3, "time": 3}, qos="")
    assert [re.split("[=:]", line)[0] for line in found] == [
        "cluster.qos",
        "cluster.time",
        "cluster.mem",
        "cluster.nice",
        "cluster.mem",
        "cluster.setup[0]",
        "cluster.extra.tme",
        "cluster.extra.time",
    ]


def test_a_local_run_is_not_held_to_the_rules_of_slurm() -> None:
    config = Config(
        model=Call("launcher.worker.models.hugging_face", {"model_type": "llama"}),
        data=Data(fasta="x.fa"),
        cluster=Cluster(time="x", extra={"nope": 1}),
    )
    assert validate.check(config) == []
    cluster = replace(config.cluster, type=ClusterType.SLURM)
    assert len(validate.check(replace(config, cluster=cluster))) == 2


def test_further_options_are_taken_in_either_spelling_and_those_of_plugins_with_dashes() -> None:
    extra = {
        "gpu_bind": "none",
        "mem-bind": "local",
        "hold": True,
        "reboot": False,
        "prefer": None,
        "--my_plugin": "off",
    }
    cluster = replace(SLURM, extra=extra)
    assert slurm_options.check(cluster) == []
    assert slurm_options.directives(cluster)[-4:] == [
        "#SBATCH --gpu-bind=none",
        "#SBATCH --mem-bind=local",
        "#SBATCH --hold",
        "#SBATCH --my_plugin=off",
    ]


def test_no_option_is_in_two_places() -> None:
    lists = (slurm_options.FLAGS, slurm_options.MAY_TAKE_A_VALUE, slurm_options.TAKE_A_VALUE, slurm_options.NOT_EXTRA)
    names = [name for names in lists for name in names]
    assert len(names) == len(set(names))
    assert set(slurm_options.ORDER) <= set(slurm_options.NOT_EXTRA)


def test_lines_stand_in_a_fixed_order() -> None:
    cluster = replace(
        SLURM,
        nodes="2-4",
        partition="gpu",
        account="lab",
        time="1-12",
        gpus_per_node="a100:4",
        mem="0",
        constraint="a|b",
        exclusive=Exclusive.USER,
        comment="5' to 3' \"lagging\" #1",
        mail_type="END,FAIL",
        nice=0,
    )
    lines = slurm_options.directives(cluster, open_mode="append", job_name="dna", ntasks_per_node=4, signal="USR2@90")
    assert lines == [
        "#SBATCH --job-name=dna",
        "#SBATCH --account=lab",
        "#SBATCH --partition=gpu",
        '#SBATCH --comment="5\' to 3\' \\"lagging\\" #1"',
        "#SBATCH --nodes=2-4",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=a100:4",
        "#SBATCH --mem=0",
        '#SBATCH --constraint="a|b"',
        "#SBATCH --exclusive=user",
        "#SBATCH --time=1-12",
        "#SBATCH --nice=0",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@90",
        "#SBATCH --mail-type=END,FAIL",
        "#SBATCH --export=ALL",
        "#SBATCH --open-mode=append",
    ]


def test_a_script_s_own_options_win_and_flags_have_no_value() -> None:
    lines = slurm_options.directives(replace(SLURM, nodes=4, requeue=False, exclusive=True), nodes=2)
    assert lines == ["#SBATCH --nodes=2", "#SBATCH --exclusive", "#SBATCH --no-requeue", "#SBATCH --export=ALL"]


def test_a_value_of_more_than_one_line_never_becomes_a_line() -> None:
    with pytest.raises(ValueError, match="one line"):
        slurm_options.directive("output", "a\nb")


def read(line: str) -> list[str]:
    """The words that sbatch makes of a line, written down from what sbatch 22.05 was seen to do."""
    words: list[str] = []
    word, quote, rest = "", "", list(line.removeprefix("#SBATCH"))
    while rest:
        letter = rest.pop(0)
        if letter == "\\":
            word += rest.pop(0)
        elif quote:
            quote, word = ("", word) if letter == quote else (quote, word + letter)
        elif letter in "\"'":
            quote = letter
        elif letter.isspace() or letter == "#":
            words += [word] if word else []
            word = ""
            if letter == "#":
                break
        else:
            word += letter
    return [*words, word] if word else words


printable = st.text(st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" '\"\\#:=$`")).filter(bool)


@given(printable)
def test_whatever_a_value_holds_it_stays_one_word(text: str) -> None:
    assert read(slurm_options.directive("comment", text)) == [f"--comment={text}"]


def cluster_of(**node: Any) -> Cluster:
    return decode.section(Cluster, node, "cluster")


def test_plain_values_become_typed_ones() -> None:
    cluster = cluster_of(
        type="slurm",
        nodes="2-4",
        time=90,
        exclusive="user",
        gpus_per_node=4,
        environment={"OMP_NUM_THREADS": 8, "NCCL_DEBUG": None},
        setup=["module load cuda"],
        begin=122530,
    )
    assert cluster == replace(
        SLURM,
        nodes="2-4",
        time=90,
        exclusive=Exclusive.USER,
        gpus_per_node=4,
        environment={"OMP_NUM_THREADS": "8"},
        setup=["module load cuda"],
        begin="122530",
    )
    assert decode.section(Cluster, decode.encode(cluster), "cluster") == cluster


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"exclusive": "yes"}, "cluster.exclusive=yes: it must be true or false or one of user, mcs, topo"),
        ({"time": True}, "cluster.time=true: it must be text, an integer or null"),
        ({"nodes": None}, "cluster.nodes=null: it must be an integer or text"),
        ({"setup": "module load cuda"}, "cluster.setup=module load cuda: it must be a list of text"),
        ({"environment": {"A": True}}, "cluster.environment.A=true: it must be text"),
        ({"environment": ["A"]}, "cluster.environment=[A]: it must be a node of keys"),
        (
            {"environment": {"WANDB_API_KEY": "hunter2"}},
            "cluster.environment.WANDB_API_KEY: it looks like a secret, and would be written to config.yaml; leave it "
            "out and put it in the environment",
        ),
        ({"tme": 5}, "cluster.tme: there is no such key; nearest: cluster.time, cluster.tmp, cluster.mem"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(node: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError) as raised:
        cluster_of(**node)
    assert raised.value.faults == [line]


def test_every_key_of_a_line_is_a_key_of_the_schema() -> None:
    names = {field.name for field in fields(Cluster)}
    assert {*slurm_options.TEXTS, *slurm_options.BOUNDS, *slurm_options.READERS} <= names
