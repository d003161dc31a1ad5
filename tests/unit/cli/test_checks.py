"""What `pdserve up` makes sure of, and the one line that each failure is."""

import socket
from pathlib import Path

import pytest

from pdserve.cli.checks import check_memory, check_model, check_port, check_ports, check_roles, worker_bytes
from pdserve.config import Settings, load_settings
from pdserve.core.errors import StartupError

GIB = 1 << 30


def settings_of(**slices: dict[str, object]) -> Settings:
    return load_settings(environ={}, overrides=slices)


def test_a_cluster_that_could_answer_nothing_is_refused() -> None:
    with pytest.raises(StartupError, match="--decode 1"):
        check_roles(settings_of(cluster={"decode": 0}))
    with pytest.raises(StartupError, match="--colocated"):
        check_roles(settings_of(cluster={"prefill": 0}))
    check_roles(settings_of(cluster={"prefill": 0}, worker={"colocated": True}))


def test_a_free_port_passes(unused_tcp_port: int) -> None:
    check_port("127.0.0.1", unused_tcp_port, "frontend.host", "--port")


def test_a_busy_port_names_the_option_that_chooses_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=rf"127.0.0.1:{port} \(Address already in use\): .*--port"):
            check_port("127.0.0.1", port, "frontend.host", "--port")


def test_a_host_that_is_not_here_names_the_setting_that_chooses_another(unused_tcp_port: int) -> None:
    with pytest.raises(StartupError, match=r"Cannot assign requested address.*--set frontend\.host="):
        check_port("192.0.2.77", unused_tcp_port, "frontend.host", "--port")
    with pytest.raises(
        StartupError, match=r"frontend\.host is 'no\.invalid', which is no address .*--set frontend\.host="
    ):
        check_port("no.invalid", unused_tcp_port, "frontend.host", "--port")


def test_ports_that_nobody_could_find_are_refused(unused_tcp_port: int) -> None:
    with pytest.raises(StartupError, match=r"port 0 is any free one, .*--port"):
        check_ports(settings_of(frontend={"port": 0}))
    with pytest.raises(StartupError, match=r"port 0 is any free one, .*--set cluster\.port="):
        check_ports(settings_of(frontend={"port": unused_tcp_port}, cluster={"port": 0}))
    with pytest.raises(StartupError, match=f"port {unused_tcp_port} cannot be the API's and the controller's, too"):
        check_ports(settings_of(frontend={"port": unused_tcp_port}, cluster={"port": unused_tcp_port}))


def test_workers_that_fit_pass_and_others_are_refused_with_both_numbers() -> None:
    settings = settings_of(cluster={"prefill": 2, "decode": 2}, engine={"kv_memory_bytes": GIB})
    needed = 4 * worker_bytes(settings)
    check_memory(settings, needed + GIB)
    with pytest.raises(StartupError, match=r"4 workers need about \d+\.\d GiB and 4\.0 GiB are free: use fewer"):
        check_memory(settings, 4 * GIB)


def test_a_scripted_worker_needs_no_weights() -> None:
    scripted = settings_of(engine={"kind": "scripted", "kv_memory_bytes": 1 << 20})
    assert worker_bytes(scripted) < worker_bytes(settings_of(engine={"kv_memory_bytes": 1 << 20}))


def test_a_number_of_blocks_counts_instead_of_bytes() -> None:
    few = settings_of(engine={"kind": "scripted", "num_blocks": 64})
    check_memory(few, GIB)
    absurd = settings_of(engine={"kind": "scripted", "num_blocks": 10**12})
    with pytest.raises(StartupError, match=r"need about 3,8\d\d,\d+\.\d GiB and 1\.0 GiB .* engine\.num_blocks="):
        check_memory(absurd, GIB)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        check_model(str(tmp_path / "none"))


def test_the_default_model_may_still_have_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path))
    check_model(Settings().model.path)
