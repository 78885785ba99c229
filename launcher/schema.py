"""Every configuration key of this program, its type and its one default.

The dataclasses are values: what ``launcher.decode`` makes of a composed configuration. Hydra itself sees the same
defaults as plain nodes (``launcher.compose``), so that a wrong value is reported by this program, together with all
other faults, and not by the first node that refuses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Mode(str, Enum):
    TRAIN = "train"
    PLAN = "plan"
    VERIFY = "verify"


class SoftMask(str, Enum):
    UPPER = "upper"
    """Lower case is read as upper case."""
    WEIGHT = "weight"
    """A lower-case target counts ``soft_mask_weight`` in the loss."""
    IGNORE = "ignore"
    """A lower-case base is read, but is no target."""


class Objective(str, Enum):
    CAUSAL = "causal"
    MASKED = "masked"


class Device(str, Enum):
    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class Dtype(str, Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Tail(str, Enum):
    CARRY = "carry"
    """Batches run on over the end of an epoch: floor(E*N/B) steps."""
    DROP = "drop"
    """What does not fill a batch at the end of an epoch is left out: E*floor(N/B) steps."""
    FLUSH = "flush"
    """The last batch of an epoch is smaller: E*ceil(N/B) steps."""


class Sync(str, Enum):
    EVERY_MICRO_BATCH = "every_micro_batch"
    """Gradients are reduced after every backward pass: a rank keeps only its partition of them."""
    ONCE_PER_WINDOW = "once_per_window"
    """A rank sums its own gradients, whole, and they are reduced once an optimizer step."""


class Scaling(str, Enum):
    """How the learning rate follows the global batch B: (B / reference)^0, ^1, ^1/2, ^2."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"
    QUADRATIC = "quadratic"


class OptimizerType(str, Enum):
    ADAMW = "adamw"
    LAMB = "lamb"
    LARS = "lars"
    SGD = "sgd"
    MUON = "muon"


class LrScheduleType(str, Enum):
    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"


class BatchScheduleType(str, Enum):
    CONSTANT = "constant"
    RAMP = "ramp"
    """From initial_batch_size to train_batch_size in equal intervals."""
    MILESTONES = "milestones"
    NOISE_SCALE = "noise_scale"
    """Grows when the measured noise scale has exceeded the batch for a while."""


class Growth(str, Enum):
    LINEAR = "linear"
    """Each interval adds ``increment`` sequences."""
    GEOMETRIC = "geometric"
    """Each interval multiplies the batch by ``growth_factor``."""


class Count(str, Enum):
    STEPS = "steps"
    """Optimizer steps."""
    TOKENS = "tokens"
    """Bases: sequences x data.sequence_length."""


class BatchNorm(str, Enum):
    ERROR = "error"
    SYNC = "sync"
    """Statistics over the micro-batch of all ranks."""
    GROUP_NORM = "group_norm"
    """Replaced by GroupNorm, which looks at one sample at a time."""


class Checkpointing(str, Enum):
    NONE = "none"
    FULL = "full"


class ClusterType(str, Enum):
    LOCAL = "local"
    SLURM = "slurm"


class Exclusive(str, Enum):
    """With whom a job may share its nodes; each is stricter than sharing with everybody."""

    USER = "user"
    """Jobs of the same user."""
    MCS = "mcs"
    """Jobs of the same security label."""
    TOPO = "topo"
    """Nobody, and nobody on the rest of their segment of the network either; Slurm 24.05 and later."""


class MicroBatch(str, Enum):
    AUTO = "auto"
    """The largest that fits."""


@dataclass(frozen=True)
class Batch:
    """The global batch and how it is cut: train_batch_size = micro x accumulation x data-parallel size, exactly."""

    train_batch_size: int | None = None
    """Sequences in one optimizer step, over all ranks."""
    train_batch_tokens: int | None = None
    """The same in bases (sequences x data.sequence_length); takes the place of train_batch_size=null."""
    train_micro_batch_size_per_gpu: int | MicroBatch | None = None
    """auto: the largest that fits into memory, which is tried out before the run."""
    gradient_accumulation_steps: int | None = None
    max_micro_batch_size_per_gpu: int = 1
    """Where the micro-batch is left to the program, it is at most this."""
    lr_scaling: Scaling = Scaling.NONE
    """optimizer.lr holds at reference_batch_size and is scaled from there to train_batch_size."""
    reference_batch_size: int | None = None
    """Sequences."""


@dataclass(frozen=True)
class Data:
    """Genomes read as windows of single nucleotides. A ``_target_`` puts any torch dataset in its place."""

    fasta: str | list[str] = "???"
    """A path, a list or a glob; plain, gzip or bgzip."""
    regions: str | None = None
    """BED file: only windows inside these regions are read."""
    validation: float | str | list[str] | None = None
    """A fraction of the bases of each contig (its end), a BED file, or names of contigs; null: no validation."""
    sequence_length: int = 1024
    """Bases in a window; it gives sequence_length - 1 causal targets."""
    stride: int | None = None
    """Bases from one window to the next; null: sequence_length."""
    reverse_complement: bool = False
    """Read each training window from a strand drawn by (seed, step, sequence)."""
    soft_mask: SoftMask = SoftMask.UPPER
    soft_mask_weight: float = 0.1
    max_n_fraction: float = 0.5
    """Windows with a larger part of bases other than A, C, G, T are left out."""
    objective: Objective = Objective.CAUSAL
    mask_fraction: float = 0.15
    """Part of the valid bases that are targets of the masked objective."""
    cache_dir: str | None = None
    """Where the tokens are cached; null: beside the genome, or under the user's cache folder if that is read-only."""
    num_workers: int = 0
    """Processes of a rank that read ahead; 0 reads in the rank itself."""


@dataclass(frozen=True)
class CustomData:
    """Any torch dataset: ``data._target_`` and its arguments."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    validation: "CustomData | None" = None
    num_workers: int = 0


@dataclass(frozen=True)
class Call:
    """An importable callable by its dotted name, with its keyword arguments (models, losses)."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Zero:
    """ZeRO; every key is DeepSpeed's own, under its own name."""

    stage: int = 1
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    memory_efficient_linear: bool = True
    """Linear layers do not keep whole weights for the backward pass; in bf16 and fp16 a bias is then rounded apart."""


@dataclass(frozen=True)
class Offload:
    optimizer: Device = Device.NONE
    parameters: Device = Device.NONE
    """At ZeRO stage 3 only."""
    nvme_path: str | None = None
    """Absolute folder on a local disk of every node."""
    pin_memory: bool = False
    buffer_count: int = 5
    """NVMe buffers of parameters in host memory."""


@dataclass(frozen=True)
class Precision:
    dtype: Dtype = Dtype.FP32
    grad_accum_dtype: Dtype = Dtype.FP32
    """What micro-batch gradients are summed in."""
    communication_data_type: Dtype | None = None
    """What gradients are reduced in over the ranks; null: grad_accum_dtype, at twice the traffic of bf16 or fp16."""
    loss_scale: float = 0.0
    """fp16; 0: dynamic."""
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1


@dataclass(frozen=True)
class Accumulation:
    sync: Sync | None = None
    """When gradients are communicated; null: once_per_window at ZeRO stages 0 and 1, every_micro_batch at 2 and 3."""
    tail: Tail = Tail.CARRY
    """What becomes of the sequences that do not fill a global batch at the end of an epoch."""


@dataclass(frozen=True)
class Optimizer:
    type: OptimizerType = OptimizerType.ADAMW
    lr: float = 1e-3
    weight_decay: float = 0.1
    """Not applied to norms, biases and embeddings."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW, LAMB, and what Muon leaves to Adam."""
    eps: float = 1e-8
    momentum: float = 0.9
    """SGD, LARS, Muon."""
    trust_coefficient: float = 1e-3
    """LARS: the part of a layer's norm that a step may move it by."""


@dataclass(frozen=True)
class LrSchedule:
    """Counted in optimizer steps; the horizon is the number of optimizer steps of the run."""

    type: LrScheduleType = LrScheduleType.COSINE
    warmup_steps: int = 0
    warmup_tokens: int | None = None
    """Bases; takes the place of warmup_steps=0: the steps that begin before so many bases were read."""
    min_lr_ratio: float = 0.1
    """Final learning rate over the peak."""
    decay_fraction: float = 0.2
    """wsd: the part of the run in which the learning rate falls."""


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch of each step on its way to ``batch.train_batch_size``.

    Counted in steps or bases, never in pieces of a batch: only the accumulation steps follow it, micro-batch and
    memory stay as they are.
    """

    type: BatchScheduleType = BatchScheduleType.CONSTANT
    by: Count = Count.STEPS
    """What ``over`` and the milestones count."""
    initial_batch_size: int | None = None
    """Sequences (ramp, noise_scale)."""
    over: int | None = None
    """Ramp: train_batch_size is reached after so many."""
    growth: Growth = Growth.GEOMETRIC
    growth_factor: int = 2
    increment: int | None = None
    """Sequences; null: initial_batch_size."""
    milestones: list[list[int]] = field(default_factory=list)
    """Pairs of (from where, sequences), the first from 0, the last of train_batch_size."""
    patience: int = 10
    """noise_scale: steps in a row that the noise scale must exceed the batch before it grows."""
    threshold: float = 1.0
    """noise_scale: the noise scale over the batch that counts as exceeding."""
    lr_scaling: Scaling = Scaling.NONE
    """The learning rate of a step, by its batch over train_batch_size."""


@dataclass(frozen=True)
class Activation:
    checkpointing: Checkpointing = Checkpointing.NONE


@dataclass(frozen=True)
class Parallel:
    sequence: int = 1
    pipeline: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Train:
    """All limits that are set apply; the earliest ends the run and fixes the learning-rate horizon."""

    max_steps: int | None = None
    max_tokens: int | None = None
    """Bases: sequences x data.sequence_length; never exceeded."""
    epochs: int | None = None
    gradient_clipping: float | None = 1.0
    """Norm of the accumulated gradient of the global batch; null: off."""
    eval_every: int | None = None
    """Optimizer steps; null: at the end only."""
    eval_batches: int | None = None
    """Global batches of the validation split; null: all of it."""
    log_every: int = 1
    """Optimizer steps between two lines on a terminal that cannot show a bar."""
    batch_norm: BatchNorm = BatchNorm.ERROR
    noise_scale: bool = True
    """Estimate the gradient noise scale where accumulation allows it."""
    noise_scale_decay: float = 0.95
    """Of the running averages behind it, a step."""
    step_timeout: float | None = 1800.0
    """Seconds without progress of a rank after which the run is ended; a first step and a save count too."""
    max_consecutive_skips: int = 10
    """The run fails after so many steps in a row without an update."""


@dataclass(frozen=True)
class Checkpoint:
    every: int | None = None
    """Optimizer steps; null: at the end only, and where a signal stops the run."""
    keep: int | None = 3
    """The newest so many are kept; null: all."""
    keep_every: int | None = None
    """Those of every so many optimizer steps are kept too."""
    asynchronous: bool = True
    """Training goes on while a copy of the states in host memory is written."""
    resume: str = "auto"
    """auto: go on from the newest whole checkpoint of the run directory, if there is one; required: or do not start;
    never: refuse a directory that holds a run; or the path of a checkpoint, of any run, to go on from."""


@dataclass(frozen=True)
class Verify:
    """mode=verify: the same global batches, cut in several ways, against one process that sees them whole."""

    steps: int = 3
    cuts: list[int] | None = None
    """Accumulation steps to try; null: a few that include the run's own."""
    learning_rate: float = 1e-3
    """Constant, so that every step moves."""


@dataclass(frozen=True)
class Cluster:
    """Where the ranks run. What belongs to Slurm has no effect with ``type=local``.

    From ``partition`` to ``tmp`` the keys are sbatch's long options, with ``_`` for ``-``, and mean what sbatch(1)
    says; null leaves the option out, so that Slurm's own default holds.
    """

    type: ClusterType = ClusterType.LOCAL
    nodes: int | str = 1
    """A number, or a range such as 2-4: as many of them as Slurm can give."""
    ranks_per_node: int | None = None
    """null: one for each visible GPU, or one on a machine without."""
    allow_fewer_ranks: bool = False
    """Where the global batch cannot be cut over the ranks there are: leave out as few of them as it takes."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | int | None = None
    """Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds."""
    time_min: str | int | None = None
    """As ``time``: Slurm may shorten the limit to this, to start the job earlier."""
    gpus_per_node: int | str | None = None
    """A number, with the type of the GPU if it matters: a100:4."""
    gres: str | None = None
    cpus_per_task: int | None = None
    """Cores of a rank."""
    mem: str | int | None = None
    """Of each node: MiB, or with a suffix K, M, G, T; 0: all of it. At most one of mem, mem_per_gpu, mem_per_cpu."""
    mem_per_gpu: str | int | None = None
    mem_per_cpu: str | int | None = None
    constraint: str | None = None
    exclusive: bool | Exclusive = False
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    begin: str | None = None
    licenses: str | None = None
    requeue: bool = True
    """Whether Slurm may start the job again after a failure of a node or a preemption; the run then goes on."""
    export: str = "ALL"
    """Which variables of the environment that submits are seen in the job."""
    nice: int | None = None
    wckey: str | None = None
    tmp: str | int | None = None
    """Disk space under the temporary folder of each node, as ``mem``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further long options of sbatch. true: the option without a value; false or null: not given."""
    signal_lead: int | None = None
    """Seconds before the end of ``time`` at which Slurm asks the run to save itself."""
    max_requeues: int = 100
    """The run is not queued again after so many times."""
    max_parallel: int | None = None
    """Points of a sweep that run at the same time; null: as many as Slurm starts."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that the job runs first, such as "module load cuda"."""
    container: list[str] = field(default_factory=list)
    """What the command of a rank is put behind, such as [apptainer, exec, --nv, image.sif]."""
    container_image: str | None = None
    """With container_mounts and container_workdir: options that the plugin pyxis adds to srun."""
    container_mounts: str | None = None
    container_workdir: str | None = None
    python: str | None = None
    """The interpreter on the nodes; null: the one that submits."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set in the job; null leaves one out."""
    stage_to: str | None = None
    """A folder on the disk of each node, such as $SLURM_TMPDIR, to which the cache of the genome is copied."""


@dataclass(frozen=True)
class Sweep:
    rerun_done: bool = False
    """Run points again that an earlier command in the same directory has done; what they left is put aside."""
    wait: bool = False
    """Of points that are submitted to Slurm: stay until all have ended."""
    skip_invalid: bool = False
    """Leave out the points that cannot be run, instead of refusing the sweep."""


@dataclass(frozen=True)
class Logging:
    wandb: bool = False
    project: str = "okazaki"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    tensorboard: bool = False
    progress_bar: bool = True
    """On a terminal; plain lines elsewhere."""


@dataclass(frozen=True)
class Config:
    """One run, whole. What a rank reads from ``config.yaml``."""

    mode: Mode = Mode.TRAIN
    name: str = "okazaki"
    seed: int = 0
    model: Call = field(default_factory=lambda: Call("???"))
    loss: Call | None = None
    """Returns (sum, weight) for models that are not language models; null: cross-entropy over bases."""
    data: Data | CustomData = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    zero: Zero = field(default_factory=Zero)
    offload: Offload = field(default_factory=Offload)
    precision: Precision = field(default_factory=Precision)
    accumulation: Accumulation = field(default_factory=Accumulation)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    batch_schedule: BatchSchedule = field(default_factory=BatchSchedule)
    activation: Activation = field(default_factory=Activation)
    parallel: Parallel = field(default_factory=Parallel)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    verify: Verify = field(default_factory=Verify)
    cluster: Cluster = field(default_factory=Cluster)
    sweep: Sweep = field(default_factory=Sweep)
    logging: Logging = field(default_factory=Logging)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Raw DeepSpeed keys, merged last."""
