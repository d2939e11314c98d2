"""What `q38 serve` refuses before it starts anything."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError, Q38Error, ResourceError
from q38.serving import engines, preflight, sglang_engine
from q38.serving.engines import Engine, Lack, Launch, ServeOptions, choose_engine
from q38.serving.preflight import check_exposure, check_memory, check_model, claim_port, is_loopback
from q38.serving.requirements import Need
from q38.serving.sglang_settings import SglangSettings


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.fixture
def model(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy to break, its shards linked."""
    out = tmp_path / "model"
    out.mkdir()
    for file in tiny_source.iterdir():
        if file.suffix == ".safetensors":
            (out / file.name).hardlink_to(file)
        elif file.is_file():
            shutil.copy(file, out / file.name)
    return out


def refused(kind: type[Q38Error], call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as error:
        call(*args, **options)
    assert error.value.remedy
    return str(error.value)


def test_a_port_in_use_is_named_with_its_owner(taken: int) -> None:
    text = refused(ResourceError, claim_port, "127.0.0.1", taken)
    assert f"port {taken} is in use" in text
    assert "pid" in text


def test_port_0_picks_a_free_one() -> None:
    port = claim_port("127.0.0.1", 0)
    assert claim_port("127.0.0.1", port) == port


@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("no.such.host.invalid", 1), ("192.0.2.1", 0)],
)
def test_a_port_or_host_that_is_none_is_bad_input(host: str, port: int) -> None:
    refused(InputError, claim_port, host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
@pytest.mark.parametrize("key", [None, ""])
def test_other_hosts_need_a_key(host: str, key: str | None) -> None:
    assert "API key" in refused(InputError, check_exposure, host, key)
    check_exposure(host, "sesame")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"]
)
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    assert name in refused(InputError, check_model, ServeOptions(model))


def test_a_chat_template_in_the_tokenizer_config_is_enough(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    check_model(ServeOptions(model))


def test_a_broken_index_is_refused(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "model-99999-of"))
    assert "model-99999" in refused(InputError, check_model, ServeOptions(model))


def test_another_architecture_is_refused(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in refused(InputError, check_model, ServeOptions(model))


def test_the_tables_directory_is_found_and_checked(model: Path, tiny_ple: Path, tmp_path: Path) -> None:
    assert check_model(ServeOptions(model))[0] is None  # the checkpoint has its own
    assert check_model(ServeOptions(model, ple=tiny_ple))[0] == tiny_ple
    refused(InputError, check_model, ServeOptions(model, ple=tmp_path))


def test_a_model_without_any_table_is_refused(model: Path, tiny_ple: Path) -> None:
    from q38.checkpoint.index import INDEX, SINGLE, Checkpoint
    from q38.checkpoint.writer import write_safetensors
    from q38.model.names import Group, classify

    checkpoint = Checkpoint.open(model)
    rest = {n: checkpoint.read(n) for n in checkpoint.tensors if classify(n) is not Group.NGRAM}
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    (model / INDEX).unlink()
    write_safetensors(model / SINGLE, rest)
    assert "q38 split-ple" in refused(InputError, check_model, ServeOptions(model))
    shutil.copytree(tiny_ple, model.parent / "ple")
    assert check_model(ServeOptions(model))[0] == model.parent / "ple"


def test_the_weights_are_counted_without_table_and_mtp(tiny_source: Path) -> None:
    from q38.checkpoint.index import Checkpoint

    _, needed = check_model(ServeOptions(tiny_source))
    assert 0.5 * Checkpoint.open(tiny_source).nbytes < needed < Checkpoint.open(tiny_source).nbytes


def test_fp8_weights_count_twice(tiny_source: Path, tiny_source_fp8: Path) -> None:
    bf16, fp8 = (check_model(ServeOptions(path))[1] for path in (tiny_source, tiny_source_fp8))
    assert fp8 == pytest.approx(bf16, rel=0.05)


def test_a_model_larger_than_memory_is_refused_with_the_shortfall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 2**30)
    assert "2.0 GiB short" in refused(ResourceError, check_memory, 3 * 2**30, where="model")
    check_memory(2**29, where="model")


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    assert "sglang, transformers" in refused(InputError, choose_engine, "vllm")


def test_sglang_says_everything_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "has_cuda_gpu", lambda: False)
    monkeypatch.setattr(sglang_engine, "lacking", lambda extra: [Need("sglang", "==9", extra, None)])
    text = refused(ResourceError, choose_engine, "sglang")
    assert "no CUDA GPU" in text
    assert "--device cpu" in text
    assert 'pip install "q38[sglang]"' in text
    assert "no CUDA GPU" not in refused(ResourceError, choose_engine, "sglang", on_cpu=True)


def test_sglang_without_its_dependencies_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "lacking", lambda extra: [])
    monkeypatch.setattr(sglang_engine.importlib.util, "find_spec", lambda name: None)
    assert "without its dependencies" in refused(ResourceError, choose_engine, "sglang", on_cpu=True)


def test_auto_takes_the_first_engine_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(name: str, *lacks: Lack) -> Engine:
        return Engine(name, "", lambda: list(lacks), lambda options: Launch([]))

    monkeypatch.setattr(
        engines, "ENGINES", {"a": engine("a", Lack("x", "get x")), "b": engine("b"), "c": engine("c")}
    )
    assert choose_engine().name == "b"
    assert choose_engine().passed_over == "engine a cannot run here: x"
    assert choose_engine("b").passed_over == ""
    monkeypatch.setattr(engines, "ENGINES", {"a": engine("a", Lack("x", "get x"))})
    assert "get x" in refused(ResourceError, choose_engine).lower()


def test_an_option_of_sglang_alone_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "lacking", lambda extra: [Need("sglang", "==9", extra, None)])
    text = refused(ResourceError, choose_engine, given=["--gpu-memory"])
    assert text.startswith("--gpu-memory: needs engine sglang, which cannot run here: ")
    assert "sglang" in text and 'pip install "q38[sglang]"' in text
    monkeypatch.setattr(sglang_engine, "lacks_on_cpu", lambda: [])
    assert choose_engine(on_cpu=True).name == "sglang"


def test_a_model_that_is_too_large_is_told_why_no_other_engine_was_taken() -> None:
    text = refused(
        ResourceError, check_memory, 2**60, where="m", passed_over="engine sglang cannot run here: no nvcc"
    )
    assert "short; engine sglang cannot run here: no nvcc" in text


@pytest.mark.parametrize("name", engines.ENGINES)
def test_the_command_lines_name_model_host_and_port(name: str, tiny_packed: Path, tiny_ple: Path) -> None:
    settings = SglangSettings(device="cpu") if name == "sglang" else SglangSettings()
    options = ServeOptions(
        tiny_packed, tiny_ple, host="127.0.0.1", port=7, name="n", api_key="sesame", sglang=settings
    )
    launch = engines.ENGINES[name].launch(options)
    assert {str(tiny_packed), "127.0.0.1", "7", "n"} <= set(launch.command)
    assert "sesame" not in " ".join([*launch.command, *launch.environment.values()])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::", "http://[::1]:7"),
        ("::1", "http://[::1]:7"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert ServeOptions(Path("m"), host=host, port=7).url == url
