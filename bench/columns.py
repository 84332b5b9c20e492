"""The runs that are compared."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Column:
    key: str
    title: str
    side: str  # "torch": baseline.py, "ours": step_bench
    arguments: tuple
    every_round: bool = False
    # Steps whose loss must equal the reference's: None for the first ones, 1 where the ranks part ways after the first update, 0 where
    # nothing true is computed.
    loss_steps: int | None = None
    environment: tuple = ()  # variables beside the caller's


# Ours is what a run on one host does by itself: shards are mapped. Over Gloo is what several hosts do.
REFERENCE, OURS, DDP, GLOO, LIMIT = "fsdp2", "ours", "ddp", "ours-gloo", "none"


def training_columns(dtype, quick):
    """In the order in which they run; the first is the reference. Quick: only those that the last line needs."""
    common = ("--dtype", dtype)
    columns = [
        Column(REFERENCE, "PyTorch FSDP2", "torch", common + ("--mode", "fsdp2"), every_round=True),
        Column(OURS, "ours, ragged", "ours", common + ("--layout", "ragged"), every_round=True),
        Column(DDP, "PyTorch DDP", "torch", common + ("--mode", "ddp"), every_round=dtype == "fp32"),
        Column(GLOO, "ours, over Gloo", "ours", common + ("--layout", "ragged"), every_round=True, environment=(("HP_SAMEHOST", "0"),)),
        Column(LIMIT, "PyTorch, no communication", "torch", common + ("--mode", "none"), every_round=True, loss_steps=1),
        Column("ours-copy", "ours, shared but copied", "ours", common + ("--layout", "ragged"), environment=(("HP_SAMEHOST", "copy"),)),
        Column("ours-per-parameter", "ours, per-parameter", "ours", common + ("--layout", "per-parameter")),
        Column("fsdp2-no-reshard", "FSDP2, no resharding", "torch", common + ("--mode", "fsdp2-no-reshard")),
        Column("ours-no-reshard", "ours, no resharding", "ours", common + ("--layout", "ragged", "--no-reshard")),
        Column("ours-faked-peers", "ours, faked peers", "ours", common + ("--layout", "ragged", "--faked-peers"), loss_steps=0),
    ]
    return [column for column in columns if column.every_round or not quick]


def host_columns(quick):
    columns = [
        Column(REFERENCE, "PyTorch FSDP2", "torch", ("--tiny", "--mode", "fsdp2")),
        Column(OURS, "ours, ragged", "ours", ("--tiny", "--layout", "ragged")),
        Column("ours-per-parameter", "ours, per-parameter", "ours", ("--tiny", "--layout", "per-parameter")),
    ]
    return columns[:2] if quick else columns
