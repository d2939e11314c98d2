"""Recipe schema. Unknown keys are errors, so that a typo cannot silently change a model."""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from q38.base.errors import InputError
from q38.base.units import parse_bytes
from q38.data import data_path
from q38.model.names import KEEP_HIGH, PACKABLE, Group

SCHEMA = "q38.recipe/1"
Bits = Literal[2, 3, 4, 8, 16]
AUTO_SAMPLES = 0  # calibration.samples: auto
_ENGINES = "transformers, on the CPU with the whole model in memory, or sglang, the server of the run"
_OF_SGLANG = ("device", "context", "kv", "gpu_memory", "ram")  # keys of serve


class Section(BaseModel):
    """Base of every part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Where the source checkpoint comes from: a directory, or a synthetic model. Exactly one of path and synth."""

    path: str | None = Field(None, description="Directory of the bf16 or FP8 checkpoint.")
    synth: Literal["tiny"] | None = Field(None, description="Make a synthetic model instead (q38 synth).")
    fp8: bool = Field(False, description="Synthetic model in the FP8 release layout.")
    trained: bool = Field(
        False, description="Train the synthetic model briefly, so that quality numbers mean something."
    )
    seed: int = Field(0, description="Seed of the synthetic model.")

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.path is None) == (self.synth is None):
            raise ValueError("give exactly one of path and synth")
        return self


class Ple(Section):
    """The n-gram table."""

    dtype: Literal["f8_e4m3", "source"] = Field(
        "f8_e4m3", description="Stored dtype; a bf16 table is quantized with one scale."
    )


class Calibration(Section):
    """Text that quantization tunes on."""

    text: str = Field(
        "multilingual",
        description="'multilingual', 'stdlib' (the local Python sources), a JSONL file with one {'text': ...} per line,"
        " a hub file, or several joined by commas; see docs/quality.md.",
    )
    samples: int = Field(
        128,
        ge=AUTO_SAMPLES,
        description="Sequences; auto (0): as many as the host memory holds, at most 128.",
    )
    seqlen: int = Field(
        2048, ge=8, description="Tokens per sequence; longer rows are cut, shorter ones joined."
    )
    chat_template: bool = Field(False, description="Wrap each text as a chat turn.")
    seed: int = Field(0, description="Order of the rows.")

    @field_validator("samples", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return AUTO_SAMPLES if value == "auto" else value


class Experts(Section):
    """How the routed experts are rounded."""

    method: Literal["rtn", "opt-rtn", "autoround", "expert-local", "expert-local-gsq"] = Field(
        "autoround",
        description="rtn: plain rounding; opt-rtn: scales searched on calibration text; autoround: SignRound on whole"
        " blocks; expert-local: SignRound on each expert alone; expert-local-gsq: GPTQ, then Gumbel-softmax.",
    )
    iters: int | None = Field(
        None, ge=0, description="Tuning steps per block; without it 200, or 400 for expert-local-gsq."
    )
    alg_ext: bool = Field(True, description="autoround: its extended algorithm, better at 2 bits.")
    batch_size: int = Field(8, ge=1, description="autoround: sequences per tuning step.")
    rows: int = Field(256, ge=1, description="expert-local: tokens per expert and tuning step.")
    min_tokens: int = Field(
        64, ge=2, description="Tuning: an expert with fewer tokens gets a searched scale instead."
    )
    max_tokens: int = Field(8192, ge=2, description="expert-local: tokens an expert is tuned on at most.")
    damp: float = Field(
        0.1, gt=0, description="expert-local-gsq: share of the mean diagonal added to the Hessian."
    )

    @property
    def steps(self) -> int:
        """Tuning steps, the default of the method filled in."""
        if self.iters is not None:
            return self.iters
        return 400 if self.method == "expert-local-gsq" else 200

    @model_validator(mode="after")
    def _some_steps(self) -> Experts:
        if self.method not in ("rtn", "opt-rtn") and self.steps == 0:
            raise ValueError(f"iters: {self.method} without a step is plain rounding; take the method rtn")
        return self


class Quantize(Section):
    """Bits per parameter group. Groups not named stay in 16 bit."""

    group_size: int = Field(128, description="Weights that share a scale, along the input dimension.")
    bits: dict[Group, Bits] = Field(
        {Group.EXPERTS: 2}, description="Width per parameter group; q38 plan lists the groups."
    )
    experts: Experts = Experts()
    vision: Literal["drop", "keep"] = Field("drop", description="The vision tower, kept in 16 bit.")
    mtp: Literal["drop", "keep"] = Field(
        "drop",
        description="The multi-token prediction layer; kept, it stays in 16 bit but for bits.mtp_experts.",
    )
    allow_low: list[Group] = Field(default_factory=list, description="Sensitive groups lowered on purpose.")

    @model_validator(mode="after")
    def _sensible_bits(self) -> Quantize:
        if self.mtp == "drop" and Group.MTP_EXPERTS in self.bits:
            raise ValueError("bits.mtp_experts: the recipe drops MTP; set mtp to keep, or remove the entry")
        for group, bits in self.bits.items():
            if bits < 16 and group not in PACKABLE:
                raise ValueError(f"bits.{group}: this group has no packable matrices; remove the entry")
            if bits < 16 and group in KEEP_HIGH and group not in self.allow_low:
                raise ValueError(
                    f"bits.{group}: a sensitive group below 16 bit; add it to allow_low if you mean it"
                )
        if self.experts.method == "expert-local-gsq" and self.bits.get(Group.EXPERTS) != 2:
            raise ValueError(
                "experts.method: expert-local-gsq chooses among the four levels of 2 bits; set bits.experts to 2"
            )
        return self


class RequantInt8(Section):
    """Dense projections re-packed to INT8 after tuning."""

    groups: list[Group] = Field(
        default_factory=lambda: [Group.GDN_OUT, Group.ATTENTION, Group.LM_HEAD],
        description="Parameter groups to re-pack. Without it, those of the default that quantize.bits does not lower.",
    )
    clip_search: bool = Field(
        False, description="Search the clipping factor with the least squared error per group."
    )
    max_relative_error: float = Field(
        0.03, gt=0, description="A tensor with a larger relative error stays in 16 bit."
    )


class Placement(Section):
    """Routing profile: which experts each layer selects."""

    engine: Literal["transformers", "sglang", "none"] = Field(
        "transformers", description="What runs the model: " + _ENGINES + "; none: no profile is made."
    )
    text: str = Field("stdlib", description="Text to trace, as for calibration.")
    tokens: int = Field(4096, ge=512, description="Tokens traced; below 512 a profile is noise.")


class Verify(Section):
    """Quality against the source on held-out text, and the limits that fail the run."""

    text: str = Field("multilingual", description="Text as for calibration; its held-out part is used.")
    tokens: int = Field(4096, ge=256, description="Tokens compared.")
    seqlen: int = Field(256, ge=16, description="Tokens per sequence.")
    max_kl: float | None = Field(
        None, gt=0, description="Mean KL divergence (nats) above which verify fails."
    )
    min_top1: float | None = Field(None, gt=0, le=1, description="Top-1 agreement below which verify fails.")


class Oracle(Section):
    """Fixed continuations, scored after the build and again at the end."""

    engine: Literal["transformers", "sglang", "none"] = Field(
        "transformers", description="What scores: " + _ENGINES + "; none: nothing is scored."
    )
    prompts: str | None = Field(
        None,
        description="Prompt file, or short: the set that ships with q38 without its long prompts; without it that set.",
    )
    repeats: int = Field(2, ge=2, description="Times to score; the spread is stored as the noise.")


class Serve(Section):
    """The server."""

    engine: Literal["auto", "transformers", "sglang"] = Field(
        "auto", description="auto: sglang where it can run, else transformers."
    )
    device: Literal["cuda", "cpu"] | None = Field(
        None, description="sglang: cpu for tests and tiny models; without it cuda."
    )
    context: int | None = Field(
        None, ge=1, description="sglang: tokens of prompt and answer together; without it the model's limit."
    )
    kv: Literal["auto", "bf16", "fp8", "int8", "int8ring_int4", "int4"] | None = Field(
        None, description="sglang: KV cache format, as q38 serve --kv."
    )
    gpu_memory: str | None = Field(
        None, description="sglang: GPU memory that it may use, like 23.4GiB; without it what is free."
    )
    ram: str | None = Field(
        None, description="sglang: host memory that it may use, like 28GiB; without it what is available."
    )
    question: str = Field("Hello! Who are you?", description="The chat question that ends a run.")
    max_tokens: int = Field(32, ge=1, description="Tokens of the answer at most.")

    @property
    def options(self) -> dict[str, str]:
        """What the recipe gives to the sglang engine: option of `q38 serve` -> value."""
        values = {key: getattr(self, key) for key in _OF_SGLANG}
        return {f"--{key.replace('_', '-')}": str(v) for key, v in values.items() if v is not None}

    @model_validator(mode="after")
    def _only_sglang(self) -> Serve:
        for key in ("gpu_memory", "ram"):
            if (text := getattr(self, key)) is not None:
                try:
                    parse_bytes(text)
                except InputError as error:
                    raise ValueError(f"{key}: {error.what}; write it like 28GiB") from None
        if self.options and self.engine != "sglang":
            raise ValueError(
                f"{next(iter(self.options))[2:]}: only engine sglang takes it; set serve.engine to sglang"
            )
        return self


class Bench(Section):
    """Speed of the running server."""

    contexts: list[int] = Field(
        default_factory=lambda: [128, 2048, 10_000], description="Prompt lengths in tokens."
    )
    concurrency: list[int] = Field(default_factory=lambda: [1], description="Requests sent at once.")
    prefix: tuple[Literal["cold", "warm"], ...] = Field(
        ("cold", "warm"),
        description="Prompts that the server has never seen, and the same ones with another question.",
    )
    max_tokens: int = Field(64, ge=2, description="Tokens generated per request.")
    repeats: int = Field(3, ge=1, description="Measured rounds per prompt length; medians are reported.")
    max_warmup: int = Field(4, ge=1, description="Rounds dropped at most, until the speed is steady.")


class Recipe(Section):
    """A whole build. Everything has a default but the name; `q38 run` needs a source here or on its command line."""

    schema_: Literal["q38.recipe/1"] = Field(alias="schema", description="Version of the recipe format.")
    name: str = Field(description="Name of the build; it ends up in the manifests.")
    source: Source | None = None
    ple: Ple = Ple()
    calibration: Calibration = Calibration()
    quantize: Quantize = Quantize()
    requant_int8: RequantInt8 = RequantInt8()
    placement: Placement = Placement()
    verify: Verify = Verify()
    oracle: Oracle = Oracle()
    serve: Serve = Serve()
    bench: Bench = Bench()

    @model_validator(mode="after")
    def _one_server(self) -> Recipe:
        for name, section in (("placement", self.placement), ("oracle", self.oracle)):
            if section.engine == "sglang" and self.serve.engine != "sglang":
                raise ValueError(
                    f"{name}.engine: sglang is the server of the run; set serve.engine to sglang as well"
                )
        width = self.quantize.bits.get(Group.EXPERTS, 16)
        if self.serve.engine == "sglang" and width != 2:
            raise ValueError(
                f"serve.engine: sglang serves 2-bit experts, here they have {width} bits; set quantize.bits.experts to 2"
            )
        return self

    @model_validator(mode="after")
    def _one_width_per_group(self) -> Recipe:
        """No group is both quantized and re-packed; sensitive ones are re-packed on purpose alone."""
        lowered = {group for group, bits in self.quantize.bits.items() if bits < 16}
        requant = self.requant_int8
        if "groups" not in requant.model_fields_set:
            left = [group for group in requant.groups if group not in lowered]
            object.__setattr__(self, "requant_int8", requant.model_copy(update={"groups": left}))
        for group in self.requant_int8.groups:
            if group not in PACKABLE:
                problem = "this group has no packable matrices; remove it"
            elif group in lowered:
                problem = f"quantize.bits lowers it to {self.quantize.bits[group]} bits already; name it in one of the two"
            elif group is Group.MTP_EXPERTS and self.quantize.mtp == "drop":
                problem = "the recipe drops MTP; set quantize.mtp to keep, or remove it"
            elif group in KEEP_HIGH and group not in self.quantize.allow_low:
                problem = "a sensitive group below 16 bit; add it to quantize.allow_low if you mean it"
            else:
                continue
            raise ValueError(f"requant_int8.groups: {group}: {problem}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe, every default filled in."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def sha256(self) -> str:
        """Hash of the resolved recipe: comments and key order do not count."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def load_recipe(name: str | Path) -> Recipe:
    """Read a recipe file, or a shipped one by name (`tiny`).

    Raises:
        InputError: no such file, not YAML, an unknown key (with the nearest known one), a bad value.
    """
    file = Path(name)
    if not file.is_file() and file.suffix == "" and data_path("recipes", f"{name}.yaml").exists():
        file = data_path("recipes", f"{name}.yaml")
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in data_path("recipes").glob("*.yaml")))
        raise InputError(
            "no such recipe", where=file, remedy=f"give a YAML file or one of: {shipped}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InputError(
            f"not readable YAML ({' '.join(str(error).split())})", where=file, remedy="correct the file"
        ) from None
    return parse_recipe(value, where=str(file))


def parse_recipe(value: Any, *, where: str = "recipe") -> Recipe:
    """Check a parsed recipe. Raises InputError for the first thing wrong."""
    if not isinstance(value, dict):
        raise InputError(
            "a recipe is a mapping of sections", where=where, remedy="start from recipes/tiny.yaml"
        )
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _keys_beside(first["loc"])
            close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
            raise InputError(f"unknown key {key}", where=where, remedy=hint) from None
        what = first["msg"].removeprefix("Value error, ")
        raise InputError(
            f"{key}: {what}" if key else what, where=where, remedy="see docs/recipe.md"
        ) from None


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    model: Any = Recipe
    for part in loc[:-1]:
        info = (
            model.model_fields.get(str(part))
            if isinstance(model, type) and issubclass(model, BaseModel)
            else None
        )
        model = info.annotation if info else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [info.alias or name for name, info in model.model_fields.items()]
    return [str(group) for group in Group]
