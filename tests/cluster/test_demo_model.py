import hashlib
import json
import os
import subprocess
import sys

import pytest

from cluster.demo_model import (
    KEPT_MODELS,
    SPECIAL_TOKENS,
    build_tokenizer,
    demo_model_dir,
    write_demo_model,
)
from cluster.errors import ConfigError
from cluster.model_folder import check_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo-model")
    write_demo_model(path)
    return path


def digest(folder):
    files = sorted(folder.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_process_writes_the_same_files(folder, tmp_path):
    code = (
        "import sys, pathlib; from cluster.demo_model import write_demo_model;"
        "write_demo_model(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)

    assert digest(tmp_path) == digest(folder)


def test_the_folder_can_be_served(folder):
    check_model_folder(folder)


def test_it_is_written_once(tmp_path):
    first = demo_model_dir(tmp_path)
    written_at = (first / "model.safetensors").stat().st_mtime_ns

    assert demo_model_dir(tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_at
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_models_of_other_code_stay_while_they_are_few(tmp_path):
    others = [tmp_path / f"demo-model-{number}" for number in range(9)]
    for age_s, folder in enumerate(others):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
        os.utime(folder, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "gguf-1").mkdir()

    used = demo_model_dir(tmp_path)

    assert set(tmp_path.iterdir()) == {used, *others[: KEPT_MODELS - 1], tmp_path / "gguf-1"}


def test_a_model_stays_that_is_used_again_and_again(tmp_path):
    used = demo_model_dir(tmp_path)
    os.utime(used, (0, 0))
    for number in range(9):
        (tmp_path / f"demo-model-{number}").mkdir()

    assert demo_model_dir(tmp_path) == used
    assert used.is_dir()
    for other in tmp_path.iterdir():
        if other != used:
            os.utime(other, (1e10, 1e10))  # of a clock that was ahead
    (tmp_path / "demo-model-9").mkdir()
    os.utime(tmp_path / "demo-model-9", (1e10, 1e10))
    assert demo_model_dir(tmp_path) == used
    assert used.is_dir()
    assert used.stat().st_mtime > 1e9


def test_tokenizer_decodes_what_it_encodes():
    tokenizer = build_tokenizer()
    text = "The prefill pool ¿reads? 漢字 and 🙂\n\tpages."

    encoded = tokenizer.encode(text)

    assert encoded.ids[0] == tokenizer.token_to_id(SPECIAL_TOKENS[0])
    assert tokenizer.decode(encoded.ids) == text
    assert len(encoded.ids) < len(text.encode())


def test_transformers_reads_the_tokenizer_alike(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "A prefix that many requests share, 漢字."

    assert theirs(text).input_ids == build_tokenizer().encode(text).ids


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", lambda c: c | {"architectures": ["T5Model"]}, "architectures"),
        ("config.json", lambda c: c | {"torch_dtype": "int4"}, "dtype"),
        ("config.json", lambda c: c | {"num_hidden_layers": 5}, "layers.4"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("model.safetensors", None, "model.safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path, name, change, words):
    write_demo_model(tmp_path)
    path = tmp_path / name
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    with pytest.raises(ConfigError, match=words):
        check_model_folder(tmp_path)
