"""generation_config.json asks for nothing that is overlooked."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_engine.errors import CheckpointCorrupt, UnsupportedModel
from llm_engine.generation_config import OFF, SETTINGS
from llm_engine.model_config import read_model_config
from tests.support.checkpoints import edit_json, reference_greedy, write_checkpoint

# Values of settings with which transformers draws other tokens, or none
ON: dict[str, object] = {
    "bad_words_ids": [[3]],
    "begin_suppress_tokens": [3],
    "cache_implementation": "quantized",
    "constraints": [{"token": 3}],
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
    "exponential_decay_length_penalty": [5, 1.5],
    "force_words_ids": [[3]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 0,
    "guidance_scale": 1.5,
    "max_time": 0.0,
    "min_length": 5,
    "min_new_tokens": 5,
    "no_repeat_ngram_size": 2,
    "num_beam_groups": 2,
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "sequence_bias": [[[3], 2.0]],
    "stop_strings": ["end"],
    "suppress_tokens": [3],
    "token_healing": True,
    "top_h": 0.4,
    "typical_p": 0.9,
    "watermarking_config": {"bias": 2.0},
}
# Odd values of settings that are said to change no token
WITHOUT_EFFECT: dict[str, object] = {
    "bos_token_id": 5,
    "cache_implementation": "static",
    "early_stopping": True,
    "length_penalty": 3.0,
    "max_length": 7,
    "pad_token_id": 9,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "use_cache": False,
    "assistant_confidence_threshold": 0.9,
    "max_new_tokens": 3,
    "chat_format": "chatml",
    "output_scores": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "llama", seed=3, num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """Its config.json alone, with end token 2."""
    shutil.copy(checkpoint / "config.json", tmp_path)
    return tmp_path


def write_settings(folder: Path, **settings: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))


def test_every_setting_that_is_checked_is_tested() -> None:
    assert ON.keys() == OFF.keys()
    assert WITHOUT_EFFECT.keys() <= SETTINGS


@pytest.mark.parametrize("name", ON)
def test_a_setting_that_is_on_is_refused_by_name(folder: Path, name: str) -> None:
    write_settings(folder, **{name: ON[name]})

    with pytest.raises(UnsupportedModel, match=rf"generation_config\.json: {name} is .*, must be"):
        read_model_config(folder)


@pytest.mark.parametrize("name", ON)
def test_config_json_is_asked_where_there_is_no_other_file(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", **{name: ON[name]})
    with pytest.raises(UnsupportedModel, match=rf"/config\.json: {name} is .*, must be absent"):
        read_model_config(folder)

    write_settings(folder)
    read_model_config(folder)  # as in transformers, which then overlooks it


@pytest.mark.parametrize("name", OFF)
def test_a_setting_that_is_off_is_accepted(folder: Path, name: str) -> None:
    for value in (None, *OFF[name]):
        write_settings(folder, **{name: value})
        read_model_config(folder)


def test_an_unknown_setting_is_refused_by_name_unless_it_is_null(folder: Path) -> None:
    write_settings(folder, new_penalty=None)
    read_model_config(folder)
    write_settings(folder, new_penalty=1.5)

    with pytest.raises(UnsupportedModel, match=r"new_penalty is 1.5, but this key is unknown"):
        read_model_config(folder)


def test_settings_without_effect_have_none_in_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    def their_tokens(**settings: object) -> list[int]:
        write_settings(checkpoint, **settings)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        assert all(getattr(model.generation_config, name) == settings[name] for name in settings)
        return reference_greedy(model.eval(), [3, 1, 4, 1, 5, 9, 2, 6], 24)

    alone = {name: {name: value} for name, value in WITHOUT_EFFECT.items()}
    plain = their_tokens()

    assert [name for name in alone if their_tokens(**alone[name]) != plain] == []
    assert their_tokens(no_repeat_ngram_size=1) != plain


def test_end_tokens_of_both_files_are_in_the_vocabulary(folder: Path) -> None:
    write_settings(folder, eos_token_id=[3, 211])
    with pytest.raises(
        UnsupportedModel, match=r"generation_config.json: eos_token_id is \(3, 211\)"
    ):
        read_model_config(folder)

    write_settings(folder, eos_token_id=3)
    edit_json(folder / "config.json", eos_token_id=211)
    with pytest.raises(
        UnsupportedModel, match=r"/config.json: eos_token_id is \(211,\), must be wi"
    ):
        read_model_config(folder)


def test_a_file_of_great_depth_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"a": ' + "[" * 100_000)

    with pytest.raises(CheckpointCorrupt, match=r"generation_config.json: not valid JSON: nested"):
        read_model_config(folder)
