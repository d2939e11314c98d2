"""The HTTP routes over the control socket, on an application of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from q38.base.errors import ResourceError
from q38.sglang_ext import routes

KEY = "a-key"
REFUSED = ResourceError("the device is gone", where="cuda").to_dict()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What reaches the process with the model; it answers with a refusal."""
    seen: list[dict[str, Any]] = []

    def ask(_path: Path, request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        return REFUSED

    monkeypatch.setattr(routes, "ask", ask)
    monkeypatch.setattr(routes, "_sglang_metrics", lambda: "sglang_figure 1\n")
    return seen


@pytest.fixture
def client(asked: list[dict[str, Any]]) -> TestClient:
    app = FastAPI()
    routes.add_routes(app, Path("none.sock"), key=KEY)
    return TestClient(app)


def scrape(client: TestClient, authorization: str) -> httpx.Response:
    return client.get("/metrics", headers={"Authorization": authorization})


def test_a_scrape_tells_sglangs_figures_where_the_models_process_refuses(client: TestClient) -> None:
    answer = scrape(client, f"Bearer {KEY}")
    assert (answer.status_code, answer.text) == (200, "sglang_figure 1\n")
    assert client.get("/q38/metrics").status_code == 503


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_the_key_is_read_as_sglang_reads_it(client: TestClient, scheme: str) -> None:
    assert scrape(client, f"{scheme} {KEY}").status_code == 200


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer other", f"Basic {KEY}", KEY])
def test_another_key_is_no_key(client: TestClient, given: str) -> None:
    assert scrape(client, given).status_code == 401


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_rows_move_only_for_a_body_that_says_it_is_json(
    client: TestClient, asked: list[dict[str, Any]], kind: str
) -> None:
    answer = client.post("/q38/residency", content='{"action": "free"}', headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["remedy"]
    assert not asked


def test_a_json_body_goes_on_and_a_refusal_has_its_status(
    client: TestClient, asked: list[dict[str, Any]]
) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/q38/residency", content='{"action": "free", "bytes": 1}', headers=headers)
    assert (answer.status_code, answer.json()) == (409, REFUSED)
    assert client.post("/q38/residency", content="[]", headers=headers).status_code == 409
    assert asked == [{"action": "free", "bytes": 1}, {"action": []}]
