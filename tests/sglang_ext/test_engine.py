"""The packed tiny model in the real SGLang engine on the CPU, against transformers on the same packed weights."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import torch

from q38.base.errors import Q38Error
from q38.serving import records
from q38.serving.client import Client
from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings
from tests.sglang_ext.conftest import missing

if TYPE_CHECKING:
    from q38.serving.launch import Server

KEY = {"Authorization": "Bearer sesame"}
PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"


def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(
    tiny_packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    """The refusal comes from SGLang's scheduler, two processes away."""
    if why := missing():
        pytest.skip(why)
    info = json.loads((tiny_ple / "ple.json").read_text())
    table = (tiny_ple / info["file"]).read_bytes()
    half = {**info, "rows": info["rows"] // 2, "bytes": len(table) // 2}
    (tmp_path / "ple").mkdir()
    (tmp_path / "ple" / info["file"]).write_bytes(table[: len(table) // 2])
    (tmp_path / "ple" / "ple.json").write_text(json.dumps(half))
    settings = SglangSettings(device="cpu", context=256)
    with (
        pytest.raises(Q38Error) as failed,
        running_server(tiny_packed, ple=tmp_path / "ple", engine="sglang", sglang=settings),
    ):
        pass
    assert f"n-gram table of {half['rows']} rows" in str(failed.value)
    assert ".log" in str(failed.value)
    assert not records.running() or all(r.engine != "sglang" for r in records.running())


@pytest.fixture(scope="module")
def texts(tiny_packed: Path) -> list[list[int]]:
    """Token ids of three texts of different length."""
    from q38.hf.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_packed)
    files = (("prose.en.txt", 300), ("code.txt", 120), ("prose.ja.txt", 40))
    return [tokenizer((PROMPTS / name).read_text())["input_ids"][:n] for name, n in files]


@pytest.fixture(scope="module")
def scored(sglang_server: Server, texts: list[list[int]]) -> list[torch.Tensor]:
    """Teacher-forced log-probabilities of each text's tokens but the first, from SGLang."""
    return [torch.tensor(input_logprobs(sglang_server, ids)[1:]) for ids in texts]


def generate(server: Server, ids: list[int], **sampling: Any) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, headers=KEY, timeout=120)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def input_logprobs(server: Server, ids: list[int]) -> list[float]:
    return [entry[0] for entry in generate(server, ids)["meta_info"]["input_token_logprobs"]]


@pytest.fixture(scope="module")
def exact_model(tiny_packed: Path, tiny_ple: Path) -> Any:
    """The same packed weights in transformers, in float32."""
    from q38.hf.load import load_model

    return load_model(tiny_packed, ple=tiny_ple, dtype=torch.float32)


def score(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """Teacher-forced log-probabilities from a transformers model."""
    from q38.hf.hooks import qsa_shortcut

    found = []
    for ids in texts:
        with torch.no_grad(), qsa_shortcut():
            logits = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        found.append(logits[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0])
    return found


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return float((torch.cat(a) - torch.cat(b)).abs().mean())


def test_log_probabilities_agree_with_transformers(
    scored: list[torch.Tensor], texts: list[list[int]], exact_model: Any, tiny_packed: Path, tiny_ple: Path
) -> None:
    from q38.hf.load import load_model

    exact = score(exact_model, texts)
    rounded = score(load_model(tiny_packed, ple=tiny_ple, dtype=torch.bfloat16), texts)
    noise = distance(exact, rounded)  # transformers against itself, bf16 against float32
    apart = distance(scored, exact)
    print(f"mean |d| {apart:.5f} nats, transformers' own noise {noise:.5f}")
    assert apart <= 1e-2
    assert apart <= 2 * noise


@pytest.mark.parametrize(
    ("ending", "part"), [("down_proj", ".experts."), ("value_proj", ".ple."), ("conv1d", ".linear_attn.")]
)
def test_the_agreement_would_show_wrong_experts_ngram_rows_and_convolutions(
    texts: list[list[int]], exact_model: Any, ending: str, part: str
) -> None:
    exact = score(exact_model, texts[1:])
    changed = [m for n, m in exact_model.named_modules() if n.endswith(ending) and part in n]
    kept = [module.weight.data for module in changed]
    for module in changed:
        module.weight.data = torch.zeros_like(module.weight)
    without = score(exact_model, texts[1:])
    for module, weight in zip(changed, kept, strict=True):
        module.weight.data = weight
    assert changed
    assert distance(exact, without) > 2e-2


def test_decoding_a_token_at_a_time_scores_as_the_whole_text_does(
    sglang_server: Server, texts: list[list[int]]
) -> None:
    ids = texts[2]
    answer = generate(sglang_server, ids, max_new_tokens=8)
    decoded = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    again = input_logprobs(sglang_server, ids + answer["output_ids"])[-8:]
    assert decoded == pytest.approx(again, abs=0.05)


def test_chat_goes_through_the_template_and_the_reasoning_parser(sglang_server: Server) -> None:
    with Client(sglang_server.url, api_key="sesame") as client:
        reply = client.chat("Hello", model="tiny", max_tokens=4)
    assert reply.completion_tokens == 4
    assert reply.finish_reason == "length"


def test_a_client_without_the_key_is_refused(sglang_server: Server) -> None:
    assert httpx.get(f"{sglang_server.url}/v1/models").status_code == 401
    assert httpx.get(f"{sglang_server.url}/v1/models", headers=KEY).status_code == 200


def test_the_key_is_on_no_command_line_of_the_server(sglang_server: Server) -> None:
    process = psutil.Process(sglang_server.pid)
    lines = [" ".join(p.cmdline()) for p in (process, *process.children(recursive=True))]
    assert len(lines) >= 3  # the server, its scheduler, its detokenizer
    assert not any("sesame" in line for line in lines)


def test_every_process_froze_its_garbage_collector_after_the_first_token(sglang_server: Server) -> None:
    """What a second freeze finds gathered since the first; a process that has imported SGLang holds some 1,000,000 objects."""
    log = sglang_server.log
    assert re.search(
        r"POST /v1/chat/completions\S* HTTP.*POST /freeze_gc HTTP/1.1\" 200", log.read_text(), re.DOTALL
    )

    def post(path: str, body: dict[str, Any]) -> None:
        answer = httpx.post(sglang_server.url + path, json=body, headers=KEY, timeout=60)
        assert answer.status_code == 200, answer.text

    def found() -> dict[str, int]:
        lines = re.findall(
            r"Freezing GC in (\w+).* process\. gen0: (\d+)->0, gen1: (\d+)->0, gen2: (\d+)->0",
            log.read_text(),
        )
        return {name: sum(map(int, counts)) for name, *counts in lines}

    post("/configure_logging", {"log_level": "debug"})
    try:
        post("/freeze_gc", {})
        deadline = time.monotonic() + 60
        while len(found()) < 3:
            assert time.monotonic() < deadline, found()
            time.sleep(0.1)
    finally:
        post("/configure_logging", {"log_level": "info"})
    print(found())
    assert found().keys() == {"Scheduler", "Tokenizer", "Detokenizer"}
    assert all(count < 100_000 for count in found().values())


def test_the_rows_were_read_while_sglang_was_imported(sglang_server: Server) -> None:
    log = sglang_server.log.read_text()
    stages = ("reader started", "pool touched", "attached and registered", "taken over: ")
    places = [log.index(f"q38 rows: {stage}") for stage in stages]
    assert places == sorted(places)
    assert log.count("q38 rows: the other tensors are loaded") == 1
    assert "reading" not in "".join(line for line in log.splitlines() if "q38 rows: " in line)
    running = psutil.Process(sglang_server.pid).children(recursive=True)
    assert not any("q38.sglang_ext.early_rows" in process.cmdline() for process in running)
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in running)


def test_more_requests_than_run_at_once_are_queued_and_none_is_lost(
    sglang_server: Server, texts: list[list[int]]
) -> None:
    prompts = [texts[2][: 8 + i] for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda ids: generate(sglang_server, ids, max_new_tokens=3), prompts))
    alone = [generate(sglang_server, ids, max_new_tokens=3) for ids in prompts]
    for a, b in zip(together, alone, strict=True):
        first = [x["meta_info"]["output_token_logprobs"][0][0] for x in (a, b)]
        assert first[0] == pytest.approx(first[1], abs=0.05)


@pytest.mark.parametrize(
    "body", [{"messages": "no list"}, {"messages": []}, {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}]
)  # fmt: skip
def test_a_malformed_request_is_answered_and_the_server_goes_on(
    sglang_server: Server, body: dict[str, Any]
) -> None:
    answer = httpx.post(
        f"{sglang_server.url}/v1/chat/completions", json={"model": "tiny", **body}, headers=KEY, timeout=60
    )
    assert 400 <= answer.status_code < 500, answer.text
    with Client(sglang_server.url, api_key="sesame") as client:
        assert client.chat("Hello", model="tiny", max_tokens=1).completion_tokens == 1


def test_a_prompt_beyond_the_context_is_refused(sglang_server: Server) -> None:
    body = {"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{sglang_server.url}/generate", json=body, headers=KEY, timeout=60).status_code == 400


@pytest.mark.parametrize("body", [{"input_ids": [5, 10**6]}, {"input_ids": [-1]}])
def test_a_token_outside_the_vocabulary_is_refused_and_the_server_goes_on(
    sglang_server: Server, texts: list[list[int]], body: dict[str, Any]
) -> None:
    """On a GPU it would end the process with the model."""
    answer = httpx.post(f"{sglang_server.url}/generate", json=body, headers=KEY, timeout=60)
    assert answer.status_code == 400
    assert "outside the vocabulary" in answer.text
    assert len(input_logprobs(sglang_server, texts[2])) == len(texts[2])


def test_metrics_are_behind_the_key_and_count_what_was_served(
    sglang_server: Server, texts: list[list[int]]
) -> None:
    url = f"{sglang_server.url}/q38/metrics"
    assert httpx.get(url).status_code == 401

    def read() -> dict[str, float]:
        lines = httpx.get(url, headers=KEY).text.splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    before = read()
    generate(sglang_server, texts[2], max_new_tokens=4)
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['q38_tokens_total{phase="prefill"}'] == len(texts[2])
    assert grown['q38_tokens_total{phase="decode"}'] == 3  # the first comes from the prompt's step
    assert grown["q38_ngram_rows_total"] == 16 * (len(texts[2]) + 3)
    assert after['q38_expert_hit_rate{phase="decode"}'] == 1.0
    assert after["q38_kv_tokens_max"] >= after["q38_kv_tokens"] >= 0


def test_sglang_and_the_extension_tell_their_figures_on_one_page(
    sglang_server: Server, texts: list[list[int]]
) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    url = f"{sglang_server.url}/metrics"
    for path in ("", "/", "/more"):  # SGLang lets them all pass without the key
        assert httpx.get(url + path, follow_redirects=True).status_code == 401

    def read() -> dict[str, float]:
        families = list(text_string_to_metric_families(httpx.get(url, headers=KEY).text))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        return {s.name: s.value for f in families for s in f.samples if s.labels.get("phase") != "prefill"}

    before = read()
    generate(sglang_server, texts[2], max_new_tokens=4)
    after = read()
    assert after["sglang:prompt_tokens_total"] - before.get("sglang:prompt_tokens_total", 0) == len(texts[2])
    assert after["q38_tokens_total"] - before["q38_tokens_total"] == 3


def test_the_routing_so_far_grows_with_every_token(sglang_server: Server, texts: list[list[int]]) -> None:
    url = f"{sglang_server.url}/q38/routing"
    assert httpx.get(url).status_code == 401
    before = httpx.get(url, headers=KEY).json()["result"]
    generate(sglang_server, texts[2], max_new_tokens=4)
    after = httpx.get(url, headers=KEY).json()["result"]
    assert after["tokens"] - before["tokens"] == len(texts[2]) + 3
    assert [len(layer) for layer in after["selections"]] == [16] * 4


def test_the_log_says_how_many_rows_lie_where(sglang_server: Server) -> None:
    assert "expert rows of" in sglang_server.log.read_text()


def test_rows_move_while_requests_run_and_no_result_changes(
    sglang_server: Server, texts: list[list[int]]
) -> None:
    url = f"{sglang_server.url}/q38/residency"
    assert httpx.get(url).status_code == 401
    before = httpx.get(url, headers=KEY).json()["status"]
    assert before["rows_on_device"] == sum(before["rows_per_layer"]) == 64
    expected = input_logprobs(sglang_server, texts[2])

    def ask(**request: Any) -> httpx.Response:
        return httpx.post(url, json=request, headers=KEY, timeout=60)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        busy = pool.submit(generate, sglang_server, texts[2], max_new_tokens=30)
        assert ask(action="shrink", rows=20).json()["status"]["rows_on_device"] == 44
        assert ask(action="grow", rows=7).json()["status"]["rows_on_device"] == 51
        busy.result()
    assert input_logprobs(sglang_server, texts[2]) == expected
    assert ask(action="shrink", rows=60).status_code == 409
    assert ask(action="explode").status_code == 400
    assert httpx.post(url, content=b"{", headers=KEY, timeout=60).status_code == 415
    typed = {**KEY, "Content-Type": "application/json"}
    assert httpx.post(url, content=b"{", headers=typed, timeout=60).status_code == 400
    assert ask(action="grow", rows=13).json()["status"]["rows_on_device"] == 64


def test_verify_judges_what_only_this_engine_offers(sglang_server: Server) -> None:
    from q38.measure.behaviour.registry import Options
    from q38.measure.verify_server import ServerOptions, verify_server

    checks = ("one-token", "finite-logprobs", "decode-prefill", "stop-strings", "nll", "context-limit")
    document = verify_server(
        sglang_server.url,
        options=ServerOptions(api_key="sesame", answer_tokens=12, capability=False),
        checks=Options(only=checks, tokens=200, max_nll=20.0),
    )
    rows = {check["name"]: check for part in document["parts"] for check in part["checks"]}
    assert {name: row["note"] for name, row in rows.items() if row["passed"] is not True} == {}
    assert rows.keys() == {*checks, "nll-finite"}
    assert document["server"]["settings"]["version"]
    assert "sesame" not in json.dumps(document)


def test_the_oracle_scores_through_the_server_as_in_transformers(
    sglang_server: Server, tiny_packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    from q38.base.errors import InputError
    from q38.measure.oracle import check, save
    from q38.measure.oracle_sglang import SglangEngine

    prompts = Path(__file__).parents[1] / "data" / "oracle.json"
    file = tmp_path / "ref.json"
    with SglangEngine(sglang_server.url, tiny_packed, api_key="sesame") as engine:
        document = save(tiny_packed, file, prompts=prompts, engine=engine)
        again = check(tiny_packed, file, prompts=prompts, engine=engine)
        with pytest.raises(InputError, match="this engine takes none"):
            check(tiny_packed, file, prompts=prompts, kind="kernel", engine=engine)
    assert [row["fault"] for row in document["self_check"]] == ["input"]
    assert again["passed"] and again["engine"]["name"] == "sglang"
    other = check(tiny_packed, file, ple=tiny_ple, prompts=prompts, dtype="float32", max_mean=0.05)
    assert other["passed"] and other["engine_changes"]["name"] == ["sglang", "transformers"]
    with pytest.raises(InputError, match="serves"):
        SglangEngine(sglang_server.url, tiny_ple, api_key="sesame")


def test_the_benchmark_reads_what_only_this_engine_counts(sglang_server: Server) -> None:
    from q38.measure.bench.plan import Plan
    from q38.measure.bench.run import bench_serve

    plan = Plan((64,), (1, 2), prefixes=("cold",), max_tokens=6, repeats=1, max_warmup=1)
    result = bench_serve(sglang_server.url, plan, api_key="sesame")
    for cell in result["cells"]:
        assert (cell["counted"], cell["completion_tokens"]) == ("by the server", 6)
        assert 0 < cell["server"]["expert_hit_rate"] <= 1
        assert cell["server"]["gpu_expert_gb_per_s"] + cell["server"]["host_link_gb_per_s"] > 0
    assert result["server"]["reports"]["version"]
    assert "sesame" not in json.dumps(result)
