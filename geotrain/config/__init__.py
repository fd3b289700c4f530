"""The two configuration files, as frozen pydantic models: the *run* (what to train) and the *cluster* (where).

Unknown keys are errors. Every error names the key, its value and the rule, and suggests the nearest known key.
A check that needs more than one block stands beside the part that owns it (for example, tensor parallelism
against the number of heads in `geotrain.parallelism.checks`).
"""

# ruff: noqa: F401 — everything imported here is what other packages use
from geotrain.config.block import (
    EXIT_FOR_GOOD,
    Block,
    ConfigError,
    Name,
    PositiveInt,
    json_schema,
    parse,
    read_json,
    relocated,
    shipped_configs,
)
from geotrain.config.cluster import (
    Address,
    ClusterConfig,
    DeviceConfig,
    HostConfig,
    LinkConfig,
    OfferConfig,
    RegionConfig,
    RestartConfig,
    WorkerConfig,
    load_cluster,
    shard_name,
    shards_of,
)
from geotrain.config.data import DataConfig, DataSet
from geotrain.config.hosts import THIS_MACHINE, host_port, is_loopback
from geotrain.config.outer import (
    SHORT_RUN,
    CodecConfig,
    FragmentConfig,
    HalosConfig,
    LimitsConfig,
    MomentumConfig,
    OuterConfig,
    OverlapConfig,
    RegionMomentumConfig,
    RuleConfig,
    SyncConfig,
    codec_config,
    rule_config,
)
from geotrain.config.plugins import PluggedCodec, PluggedRule
from geotrain.config.run import (
    AccoConfig,
    CheckpointConfig,
    ModelConfig,
    MonitorConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    WandbConfig,
    changed_run,
    load_run,
)
from geotrain.config.topology import Topology, WorkerSetup
from geotrain.families import Architecture, UnsupportedModelError, architecture_from_hf
