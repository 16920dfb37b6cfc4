import pytest
import ray

from cluster.config import load_config
from cluster.demo_model import demo_model_dir
from cluster.errors import StartError
from cluster.launch import _refuse_misfits, _settings, start_cluster


def test_what_a_user_sets_about_the_engine_reaches_the_workers(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("deterministic: false\nmodel: /models/tiny", encoding="utf-8")

    settings = _settings(load_config(path, {"dtype": "float16"}), "decode-0", "cuda")

    assert not settings.deterministic
    assert settings.dtype == "float16"
    assert settings.served_model_name == "tiny"


def test_workers_with_different_models_fail_the_start_with_the_difference():
    _refuse_misfits({})
    reason = "not the model of decode-0: page_size is 16, theirs 64"
    with pytest.raises(StartError, match=f"one model, but decode-1 serves {reason}"):
        _refuse_misfits({"decode-1": reason})


def test_a_ray_that_does_not_start_is_explained(monkeypatch):
    def init(**_):  # as Ray does where the processors are busy
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    config = load_config(None, {"model": str(demo_model_dir()), "device": "cpu", "port": 0})

    with pytest.raises(StartError, match=r"cannot start Ray on this host: .* timed out"):
        start_cluster(config, shows_worker_logs=False)
