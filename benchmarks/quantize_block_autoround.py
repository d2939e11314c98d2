"""AutoRound itself on one block, for comparison: the run that `q38 quantize` with `method: autoround` makes of it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.quantize_block_model import VOCABULARY
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix
from q38.model.names import LAYERS
from q38.quantize import autoround as driver
from q38.quantize.adjustments import Run, replaced
from q38.quantize.blockstate import BlockState
from q38.quantize.local.block import outputs
from q38.quantize.local.store import PROJECTIONS, Expert
from q38.quantize.local.tokens import Routed
from q38.quantize.plan import make_plan
from q38.quantize.runlog import logged_to
from q38.quantize.torch_state import compute_dtype
from q38.recipe.schema import parse_recipe

if TYPE_CHECKING:
    from benchmarks.quantize_block import Bench

_SEQUENCES = 8  # per step, AutoRound's default
_STEPS = 200  # AutoRound's default


def autoround(
    bench: Bench, block: int, states: list[torch.Tensor], judged: Routed, options: list[str]
) -> dict[str, Any]:
    """Tune the experts of the first block alone; its other matrices stay as they are.

    Args:
        states: what enters the block, one [1, T, hc_count * H] per sequence.
        options: "alg_ext"; "low" moves AutoRound's caches to the host, as `q38 quantize` has it; "steps=N"; "stop=S"
            ends the tuning at the first step after S seconds in the block that is no better than the best so far,
            whose state is kept; "limit=S" gives up after S seconds, when the time of a step and the peak have been said.
    """
    changes = dict(option.split("=") for option in options if "=" in option)
    steps = int(changes.get("steps", bench.args.steps or _STEPS))
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "block",
            "calibration": {"samples": len(states), "seqlen": states[0].shape[1]},
            "quantize": {
                "bits": {"experts": 2},
                "experts": {
                    "method": "autoround",
                    "iters": steps,
                    "alg_ext": "alg_ext" in options,
                    "batch_size": min(_SEQUENCES, len(states)),
                },
            },
        }
    )
    plan = make_plan(Checkpoint.open(bench.source), recipe)
    scratch = bench.args.workdir / "autoround"
    scratch.mkdir(exist_ok=True)
    experts: dict[int, Expert] = {}
    marks: dict[str, float] = {}

    def sink(index: int, matrix: Callable[[str], PackedMatrix]) -> None:
        marks["packed"] = bench.sync()
        for e in range(plan.shape.num_experts):
            prefix = f"{LAYERS}.{index}.mlp.experts.{e}"
            gate, up, down = (
                PackedMatrix(*(t.cpu() for t in matrix(f"{prefix}.{name}"))) for name in PROJECTIONS
            )
            experts[e] = Expert(gate, up, down, None, None, None)

    def finished(index: int) -> None:
        raise driver.Stop

    state = BlockState(scratch, done=0, total=len(plan.blocks), seed=0, finished=finished)
    # Not used but for a mask, which leaves out padding (0 here) and repetitions of the last token.
    ids = torch.arange(states[0].shape[1]).remainder(VOCABULARY - 1).add(1).repeat(len(states), 1)
    device = "0" if bench.cuda else "cpu"
    begun = bench.sync()
    with (
        logged_to(scratch / "autoround.log") as log,
        _inputs(states, bench, marks, stop=float(changes.get("stop", "inf"))),
        _caches_on_the_device(bench.cuda and "low" not in options),
        _limited(float(changes.get("limit", 0))),
        torch.enable_grad(),
    ):
        run = Run(None, state, compute_dtype(bench.args.device))
        driver.tune(
            bench.source, plan, recipe, ids, run, sink,
            scratch=scratch, device=device, threads=torch.get_num_threads(), counts={},
        )  # fmt: skip
        loss = log.take_loss()
    peak = bench.peak()
    full = marks["packed"] - marks["entered"] + marks.get("a step", 0.0) * (_STEPS - marks["count"])
    bench.say(f"AutoRound: {full:.0f} s a block with {_STEPS} steps, DERIVED from the seconds of a step")
    bench.say(
        f"AutoRound: {marks['entered'] - begun:.1f} s until the block, {marks['tuned'] - marks['entered']:.1f} s in it"
        f" ({marks['steps']:.1f} s in {marks['count']:.0f} steps), {marks['packed'] - marks['tuned']:.1f} s packing"
    )
    return {
        "seconds": marks["packed"] - marks["entered"],
        "tuning": marks["steps"],
        "steps": int(marks["count"]),
        "peak": peak,
        "error": bench.error(block, judged, outputs(experts, judged, 2)),
        **loss,
    }


@contextmanager
def _inputs(
    states: list[torch.Tensor], bench: Bench, marks: dict[str, float], *, stop: float
) -> Iterator[None]:
    """Give AutoRound's first block other inputs than the embedding of the calibration tokens, and time it."""
    from auto_round.algorithms.composer import AlgorithmComposer
    from auto_round.algorithms.quantization.sign_round.quantizer import SignRoundQuantizer
    from auto_round.compressors.orchestrator import CompressionOrchestrator

    whole, composed = CompressionOrchestrator._quantize_blocks, AlgorithmComposer.compress_block
    tuned, stepped = SignRoundQuantizer.quantize_block, SignRoundQuantizer._step

    @functools.wraps(whole)
    def quantize_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        marks["entered"] = bench.sync()
        place = self.compress_context.cache_device
        kwargs["resume_input_ids"] = [states.pop(0).to(place) for _ in range(len(states))]
        return whole(self, *args, **kwargs)

    @functools.wraps(composed)
    def compress_block(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = composed(self, *args, **kwargs)
        marks["tuned"] = bench.sync()
        return result

    @functools.wraps(stepped)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stepped(self, *args, **kwargs)
        now = bench.sync()
        count = marks["count"] = marks.get("count", 0) + 1
        if count == 1:
            marks["first"] = now
        else:
            marks["a step"] = (now - marks["first"]) / (count - 1)
        if now - marks["entered"] > stop:
            self.dynamic_max_gap = 1  # AutoRound's own early end
        if count <= 5 or count % 10 == 0:
            bench.say(
                f"AutoRound: step {count:.0f}, {now - marks['entered']:.1f} s in the block,"
                f" {marks.get('a step', 0):.3f} s a step after the first, peak {bench.peak():.1f} GiB"
            )
        return result

    @functools.wraps(tuned)
    def quantize_block(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = bench.sync()
        result = tuned(self, *args, **kwargs)
        marks["steps"] = bench.sync() - start
        return result

    with (
        replaced(CompressionOrchestrator, "_quantize_blocks", quantize_blocks),
        replaced(AlgorithmComposer, "compress_block", compress_block),
        replaced(SignRoundQuantizer, "quantize_block", quantize_block),
        replaced(SignRoundQuantizer, "_step", step),
    ):
        yield


@contextmanager
def _caches_on_the_device(wanted: bool) -> Iterator[None]:
    """Keep AutoRound's caches and best state on the GPU, where they fit one of 139 GiB."""
    import auto_round

    if not wanted:
        yield
        return
    original = auto_round.AutoRound

    def build(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "low_gpu_mem_usage": False})

    with replaced(auto_round, "AutoRound", build):
        yield


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after some seconds; 0: never."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
