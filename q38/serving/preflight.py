"""What `q38 serve` refuses before it loads anything."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import replace
from pathlib import Path

import psutil

from q38.base.errors import InputError, ResourceError
from q38.base.memory import available_memory
from q38.base.units import format_bytes
from q38.checkpoint.index import read_json
from q38.model.names import Group, classify
from q38.model.shape import ModelShape
from q38.serving.engines import Engine, ServeOptions, choose_engine
from q38.serving.records import read_record
from q38.serving.sglang_settings import refuse_conflicts

MAX_PORT = 65535


def preflight(options: ServeOptions) -> tuple[ServeOptions, Engine]:
    """Check everything that can be checked without loading.

    Returns the options with port 0 replaced by a free one, `ple` by the table's directory, and the checkpoint opened; and the
    engine.

    Raises:
        InputError: bad host, port or key; the model directory is missing or broken.
        ResourceError: the port is in use, the engine cannot run here, the model does not fit.
    """
    wanted = "sglang" if options.engine == "auto" else options.engine
    refuse_conflicts(options.sglang, engine=wanted, device=options.sglang.device or "cuda")
    check_exposure(options.host, options.api_key)
    options = replace(options, checkpoint=options.opened())
    table, needed = check_model(options)
    options = replace(options, port=claim_port(options.host, options.port))
    engine = choose_engine(options.engine, given=options.sglang.given, on_cpu=options.sglang.on_cpu)
    if engine.name == "transformers":
        check_memory(needed, where=str(options.model), passed_over=engine.passed_over)
    return replace(options, ple=table), engine


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to listen beyond this machine without a key."""
    if not is_loopback(host) and not api_key:
        raise InputError(
            f"{host} is reachable from other machines and no API key is set",
            where="--host",
            remedy="set Q38_API_KEY or --api-key, or use --host 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is this machine's own loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(port: int, *, least: int = 1) -> None:
    """Refuse a number that is no port; `least` is 0 where that stands for any free one.

    Raises:
        InputError: as said.
    """
    if not least <= port <= MAX_PORT:
        free = "" if least else ", or 0 for any free one"
        raise InputError(f"{port} is not a port", where="--port", remedy=f"use 1 to {MAX_PORT}{free}")


def claim_port(host: str, port: int) -> int:
    """Bind and release `port` to see that it is free; 0 picks a free one."""
    check_port(port, least=0)
    try:
        with open_socket(host, port) as sock:
            return int(sock.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"port {port} is in use{_by_whom(port)}", where="--port", remedy=_free(port)
            ) from None
        if error.errno == errno.EACCES:
            raise InputError(
                f"port {port} needs root", where="--port", remedy="use a port above 1023"
            ) from None
        raise InputError(
            f"cannot listen on {host} ({error.strerror})",
            where="--host",
            remedy="use an address of this machine",
        ) from None


def open_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet: clients are refused, other servers are kept out."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # As every server does: connections of a stopped server in TIME_WAIT do not hold the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def check_model(options: ServeOptions) -> tuple[Path | None, int]:
    """Check the model directory.

    Returns where its n-gram table was split to (None: it is in the checkpoint), and the bytes that loading takes
    at least; the table stays on disk.
    """
    from q38.ple.find import find_ple

    checkpoint = options.opened()
    shape = ModelShape.from_config(checkpoint.config, where=str(options.model / "config.json"))
    _check_tokenizer(options)
    in_checkpoint = Group.NGRAM in checkpoint.group_bytes
    # The loader's order: the checkpoint's own table is the exact one.
    table = None if in_checkpoint and options.ple is None else find_ple(options.model, options.ple)
    if shape.ngram and table is None and not in_checkpoint:
        raise InputError(
            "the n-gram table is neither here nor in a ple/ directory beside it",
            where=options.model,
            remedy="give --ple DIR, the output of q38 split-ple",
        )
    stored = checkpoint.match(lambda name: classify(name) not in (Group.NGRAM, Group.MTP, Group.MTP_EXPERTS))
    # FP8 weights become bf16.
    return table, sum(t.nbytes * (2 if t.dtype == "F8_E4M3" else 1) for t in stored)


def check_memory(needed: int, *, where: str, passed_over: str = "") -> None:
    """Refuse a model whose weights alone exceed the memory that is free now.

    Args:
        passed_over: why no other engine was chosen.

    Raises:
        ResourceError: names the shortfall.
    """
    free = available_memory()
    if needed > free:
        raise ResourceError(
            f"the weights need {format_bytes(needed)} of memory, {format_bytes(free)} are free: "
            f"{format_bytes(needed - free)} short" + (f"; {passed_over}" if passed_over else ""),
            where=where,
            remedy="use a larger machine, or --engine sglang on one with a CUDA GPU",
        )


def _check_tokenizer(options: ServeOptions) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (options.model / name).is_file():
            raise InputError(
                "no such file", where=options.model / name, remedy="copy it from the source checkpoint"
            )
    inline = read_json(options.model / "tokenizer_config.json").get("chat_template")
    if not inline and not (options.model / "chat_template.jinja").is_file():
        raise InputError(
            "has no chat template",
            where=options.model,
            remedy="copy chat_template.jinja from the source checkpoint",
        )


def _by_whom(port: int) -> str:
    record = read_record(port)
    if record is not None:
        return f" by q38 (pid {record.pid}, {record.model})"
    try:
        listeners = [
            c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid
        ]
        return f" by {psutil.Process(listeners[0]).name()} (pid {listeners[0]})" if listeners else ""
    except (psutil.Error, OSError):
        return ""


def _free(port: int) -> str:
    if read_record(port) is not None:
        return f"stop it with: q38 serve stop --port {port}"
    return "choose another with --port (0 picks a free one)"
