"""A folder that cannot be served is refused by serve and found by doctor, at once and by name."""

import json
import shutil
import time

import pytest

from cluster import preflight
from cluster.config_file import load_config
from cluster.demo_model import demo_model_dir
from cluster.doctor import examine
from cluster.errors import ConfigError
from cluster.model_folder import check_model_folder
from tests.cluster.fact_samples import CPU_HOST, GPU_HOST
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.wall_clock import assert_within


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(demo_model_dir(), tmp_path / "model")


def model_finding(facts, folder, **options):
    config = load_config(None, {"port": 0, "http_port": 0, "model": str(folder)} | options)
    return {each.check: each for each in examine(facts, config)}["model"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "chat_template.jinja: does not compile"),
        ("{{ 'x' | nonsense }}", "No filter named 'nonsense'"),
        ("{{ '{:>100000000000}'.format(1) }}", "of memory"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused_before_anything_is_started(
    folder, template, words
):
    (folder / "chat_template.jinja").write_text(template)

    with pytest.raises(ConfigError, match="chat template") as caught:
        check_model_folder(folder)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"max_position_embeddings": 1}, "max_position_embeddings is 1, must be"),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be"),
        ("config.json", {"eos_token_id": 512}, "eos_token_id is (512,), must be within 0..511"),
        ("config.json", {"is_causal": False}, "is_causal is False, must be"),
        ("generation_config.json", {"eos_token_id": 10**6}, "must be within 0..511"),
        ("generation_config.json", {"num_beams": 4}, "num_beams is 4, must be"),
        ("tokenizer_config.json", {"eos_token": "<new>"}, "eos_token '<new>' is token 512"),
        ("tokenizer_config.json", {"bos_token": "<new>"}, "vocab_size in config.json is 512"),
    ],
)
def test_a_wrong_setting_fails_at_once_and_by_name(folder, file, changes, words):
    edit_json(folder / file, **changes)
    began = time.perf_counter()

    finding = model_finding(CPU_HOST, folder)

    assert_within(time.perf_counter() - began, 1)
    assert finding.level == "fail"
    assert words in finding.found
    with pytest.raises(ConfigError) as refused:
        check_model_folder(folder)
    assert str(refused.value) == finding.found


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_file_of_great_depth_fails_by_name(folder, file):
    (folder / file).write_text('{"chat_template": ' + '{"a": ' * 100_000)

    finding = model_finding(CPU_HOST, folder)

    assert finding.level == "fail"
    assert file in finding.found


def test_a_padding_token_outside_the_vocabulary_is_none_of_the_models_business(folder):
    edit_json(folder / "tokenizer_config.json", pad_token="<pad>")

    assert model_finding(CPU_HOST, folder).level == "ok"


def test_heads_without_a_kernel_are_refused_for_gpus_only(monkeypatch, tmp_path):
    write_checkpoint(tmp_path, num_hidden_layers=1, head_dim=24)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_dir() / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    words = "config.json: head_dim is 24, must be a multiple of 16 up to 256 on GPUs"
    monkeypatch.setattr(preflight, "most_gpus", lambda: 2)
    monkeypatch.setattr(preflight, "count_gpus", lambda: 2)

    assert words in model_finding(GPU_HOST, tmp_path).found
    assert model_finding(GPU_HOST, tmp_path, device="cpu").level == "ok"
    options = {"model": str(tmp_path), "port": 0, "http_port": 0}
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=words):
            preflight.check_start(load_config(None, options | {"device": device}))
    assert preflight.check_start(load_config(None, options | {"device": "cpu"})) == "cpu"
