"""What Ray reads from the environment."""

from pathlib import Path

from pdserve.cluster.environment import local_ray_environment, write_token


def test_a_token_is_random_and_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path)
    first = path.read_text()
    write_token(path)
    assert len(first) == 64
    assert path.read_text() != first
    assert path.stat().st_mode & 0o777 == 0o600


def test_authentication_is_on_with_that_token(tmp_path: Path) -> None:
    environment = local_ray_environment(tmp_path / "token")
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
