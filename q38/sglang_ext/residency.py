"""The expert rows of the model that this process serves: opened and filled once, then found by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import ResourceError
from q38.base.settings import cpu_count
from q38.base.units import format_bytes
from q38.checkpoint.index import Checkpoint
from q38.model.shape import ModelShape
from q38.residency.adapt import Adapter, AdaptSettings
from q38.residency.attached import Attached, Unanswered
from q38.residency.cache import ExpertCache, Heat, PoolPlan, open_cache
from q38.residency.driver import Cuda, Driver
from q38.residency.heat import hottest_overall
from q38.residency.layout import ExpertLayout
from q38.residency.loader import LoadReport, load_rows
from q38.residency.shards import ReadPlan, expert_layout, plan_reads
from q38.residency.store import RowStore
from q38.sglang_ext import early_rows
from q38.sglang_ext.clock import at
from q38.sglang_ext.control import ControlServer
from q38.sglang_ext.gate import Gate
from q38.sglang_ext.host_memory import HostMemory
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.row_plan import KEEP, plan_rows, read_heat
from q38.sglang_ext.staging import open_staging
from q38.sglang_ext.traffic import Traffic

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
# What a routing profile is worth in tokens of traffic; without one, all experts alike.
_PROFILE, _NO_PROFILE = 2000.0, 32.0
_INTERVAL = 8  # tokens; an exchange of all spare slots takes the link for a hundredth of that time


class ExpertRows:
    """All rows of one model, with the address table that kernels read.

    Attributes:
        layout: of one row.
        scale_dtype: of the scales in the rows.
        cache: grows, shrinks and refills the rows in device memory.
        loaded: how loading went.
        traffic: which rows were read.
        staging: copies host rows ahead of prompt steps; None where they are read in place.
        top_k: experts of a token.
        adapter: exchanges rows by what was read; None where they stay.
        others: further parts of the status, by name: n-gram rows, KV cache.
    """

    def __init__(self, checkpoint: Checkpoint, options: ExtensionOptions, device: torch.device) -> None:
        """Open the cache and fill it from the checkpoint.

        Raises:
            InputError: the checkpoint holds no rows, or the profile is of another model.
            ResourceError: they do not fit.
        """
        import torch

        shape = ModelShape.from_config(checkpoint.config)
        self.layout = expert_layout(checkpoint)
        driver, stream = _driver(device)
        total = shape.num_layers * shape.num_experts
        rows = plan_rows(
            shape, self.layout, options, _rows_on_device(options, driver, self.layout.row_bytes, total)
        )
        early = _attach(options, rows.pool)
        # Refuses before anything is allocated; the early reader has done so.
        plan = None if early else plan_reads(checkpoint, self.layout)
        self.cache: ExpertCache = open_cache(
            driver,
            self.layout.row_bytes,
            rows.resident,
            rows.heat,
            stream=stream,
            fewest=options.fewest_device_rows,
            spare=options.spare,
            scratch=rows.scratch,
            limits=None if early is None else early.limits(),
            keep=KEEP,
            shared=None if early is None else early.shared,
        )
        if early is not None:
            logger.info("q38 rows: %s", at("attached and registered"))
        self.loaded = _load(checkpoint, self.layout, self.cache.store, plan, early)
        self.scale_dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[self.loaded.scale_dtype]
        self.gate = Gate()
        self.others: dict[str, Callable[[], dict[str, Any]]] = {}
        self._device, self.top_k = device, shape.num_experts_per_tok
        self.traffic = Traffic(self.cache, self.layout.row_bytes, device)
        self.staging = open_staging(self.cache, self.layout, options.staging, self.top_k, device)
        self.adapter = _adapter(self, options, rows.heat)
        self._exchanged: int | None = None  # by an adapter that has failed
        self._table = self.cache.store.table.tensor()  # int64 [layers, experts]
        logger.info(
            "q38: %d expert rows of %s, %d in device memory, %s pinned",
            total,
            format_bytes(self.layout.row_bytes),
            int(rows.resident.sum()),
            format_bytes(self.cache.store.pool.pinned),
        )

    def table(self, layer: int) -> torch.Tensor:
        """int64 [experts]: addresses of a layer's rows. The tensor stays; its content follows every move."""
        return self._table[layer]

    def follow_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Move rows against the stream that the model runs on, None for the current one; SGLang chooses it after loading."""
        if self._device.type == "cuda":
            import torch

            self.cache.store.stream = (stream or torch.cuda.current_stream(self._device)).cuda_stream

    def adapt(self, tokens: int) -> None:
        """Exchange rows by what the steps so far have read, without waiting for the device. Call before a decode step.

        Args:
            tokens: of the step.
        """
        if self.adapter is None:
            return
        try:
            self.adapter.step(tokens)
        except ResourceError as error:  # every row stays readable, and the step need not fail
            logger.warning("q38: rows are exchanged by request only from now on: %s", error)
            self._exchanged, self.adapter = 2 * self.adapter.swapped, None

    def place_by(self, file: Path) -> None:
        """Hold the hottest rows of another routing profile in device memory, as many as now.

        Raises:
            InputError: the profile is of another model.
            ResourceError: no slot is free to exchange rows through.
        """
        heat = read_heat(file, self.cache.layers, self.cache.experts)
        count = int(self.cache.resident.sum())
        self.cache.set_heat(heat)
        self.cache.set_resident(hottest_overall(heat, count))
        if self.adapter is not None:
            self.adapter.follow(heat, _PROFILE)

    def routing(self) -> dict[str, Any]:
        """How often each expert was chosen since the start: {"selections": [layers][experts], "tokens": int}."""
        self.traffic.collect()
        counts = self.traffic.counts
        return {
            "selections": counts.tolist(),
            "tokens": int(counts.sum()) // (self.cache.layers * self.top_k),
        }

    def status(self) -> dict[str, Any]:
        """Counts and bytes, for the control interface. Call between steps: it waits for the device."""
        self.traffic.collect()
        return {
            **self.cache.status(),
            "row_bytes": self.layout.row_bytes,
            "rows_exchanged": self._exchanged if self.adapter is None else 2 * self.adapter.swapped,
            "traffic": self.traffic.status(self.top_k),
            **{name: figures() for name, figures in self.others.items()},
        }


_rows: ExpertRows | None = None


def open_rows(checkpoint: Checkpoint, options: ExtensionOptions, device: torch.device) -> ExpertRows:
    """Load the rows of this process's model.

    Raises:
        as ExpertRows; ResourceError where a model was loaded before.
    """
    global _rows
    if _rows is not None:
        raise ResourceError("this process holds a model's rows already", where="expert rows")
    _rows = ExpertRows(checkpoint, options, device)
    if options.control is not None:
        ControlServer(_rows, Path(options.control))
    return _rows


def loaded() -> ExpertRows | None:
    """The rows of this process's model, None before they are loaded."""
    return _rows


def rows() -> ExpertRows:
    """The rows of this process's model.

    Raises:
        ResourceError: they are not loaded yet.
    """
    if _rows is None:
        raise ResourceError("the expert rows are not loaded", where="expert rows")
    return _rows


def _driver(device: torch.device) -> tuple[Driver, int]:
    """The driver, and the stream that SGLang runs the model on."""
    if device.type != "cuda":
        return HostMemory(), 0
    import torch

    return Cuda(device.index or 0), torch.cuda.current_stream(device).cuda_stream


def _adapter(rows: ExpertRows, options: ExtensionOptions, heat: Heat) -> Adapter | None:
    if not options.adapt:
        return None
    worth = _NO_PROFILE if options.profile is None else _PROFILE
    settings = AdaptSettings(swaps=options.spare, interval=_INTERVAL, prior_tokens=worth)
    return Adapter(rows.cache, heat, rows.traffic, top_k=rows.top_k, settings=settings)


def _attach(options: ExtensionOptions, pool: PoolPlan) -> Attached | None:
    """The rows that a process of its own has begun to read; None where there is none, or it cannot help.

    Raises:
        InputError: it found the checkpoint to be at fault.
    """
    where = early_rows.address(options)
    if where is None:
        return None
    try:
        early = Attached(where, pool)
    except Unanswered as why:
        logger.warning("q38 rows: the early reader does not help (%s): reading all rows here", why)
        return None
    early.back(cpu_count())
    return early


def _load(
    checkpoint: Checkpoint,
    layout: ExpertLayout,
    store: RowStore,
    plan: ReadPlan | None,
    early: Attached | None,
) -> LoadReport:
    """Fill the rows and the address table: with what the early reader reads, and by reading the rest."""
    if early is not None:
        missing = ~early.receive(store)
        logger.info("q38 rows: %s", at(f"taken over: {early.told}"))
        if early.report is not None and not missing.any():
            store.publish()
            return early.report
        logger.warning(
            "q38 rows: the early reader was lost (%s): reading %d rows here", early.lost, missing.sum()
        )
        # All are there, and yet it did not say so: nobody vouches for them.
        plan = plan_reads(checkpoint, layout).only(missing if missing.any() else ~missing)
    report = load_rows(checkpoint, layout, store, plan=plan)
    logger.info("q38 rows: %s", at(f"read at {report.gb_per_second:.2f} GB/s"))
    return report


def _rows_on_device(options: ExtensionOptions, driver: Driver, row_bytes: int, total: int) -> int:
    if options.device_rows is not None:
        return min(options.device_rows, total)
    room = max(driver.memory()[0] - options.reserve, 0)
    return int(min(room // row_bytes - options.spare, total)) if room else 0
