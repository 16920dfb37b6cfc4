import re
from itertools import pairwise

import pytest

from cli.reference import PAGE, configuration_page
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.config_options import SECTIONS, config_options, pool_options
from cluster.errors import ConfigError
from cluster.pool_config import PoolConfig


def write(folder, text):
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_overrides_defaults_and_flags_override_the_file(tmp_path):
    path = write(tmp_path, "prefill: 2\ndecode: 3\nrouter:\n  max_resumptions: 1\n")

    config = load_config(
        path, {"decode": 4, "transfer.post_s": 1.5}, lambda given: {"prefill": 9, "page_size": 16}
    )

    assert (config.prefill, config.decode, config.page_size) == (2, 4, 16)
    assert config.router.max_resumptions == 1
    assert config.transfer.post_s == 1.5


def test_numbers_of_a_file_may_be_integers_for_fractions_and_have_exponents(tmp_path):
    text = "stop_grace_s: 3\ntransfer: {assumed_bytes_per_s: 1e9, post_s: .5e+1, ack_s: 2.E1}\n"

    config = load_config(write(tmp_path, text), {})

    assert (config.stop_grace_s, config.transfer.assumed_bytes_per_s) == (3, 1e9)
    assert (config.transfer.post_s, config.transfer.ack_s) == (5, 20)


def test_an_empty_file_changes_nothing(tmp_path):
    assert load_config(write(tmp_path, "# nothing\n"), {}) == ClusterConfig()


POOLS = """\
ray_address: auto
pools:
  decode: {accelerator_type: H100}
  small: {role: decode, workers: 3, num_pages: 64, resources: {rack-a: 0.001}}
  early:
    role: prefill
"""


def test_pools_have_a_role_a_number_and_what_differs(tmp_path):
    config = load_config(write(tmp_path, POOLS), {"decode": 2})

    assert config.further_pools == {"decode-small": 3, "prefill-early": 1}
    assert "at the start, by default 1." in pool_options("early")["pools.early.workers"].description
    assert (config.num_workers("prefill"), config.num_workers("decode")) == (2, 5)
    assert config.pool("decode").amounts == {"accelerator_type:H100": 0.001}
    assert config.pool("decode-small").amounts == {"rack-a": 0.001}
    assert config.pool("decode-small").num_pages == 64
    assert config.pool("prefill") == PoolConfig()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pools: 3", "pools: found 3; allowed: a mapping of names to the options of pools"),
        ("pools: {small: 3}", "pools.small: found 3; allowed: a mapping of the options of this "),
        ("pools: {small: {}}", "pools.small: found {}; allowed: a mapping of the "),
        ("pools: {small: {role: x}}", "pools.small.role: found 'x'; allowed: prefill or decode"),
        ("pools: {small: {workers: 2}}", "pools.small.role: found none; allowed: prefill or dec"),
        (
            "pools: {small: {role: decode, workers: 0}}",
            "pools.small.workers: found 0; allowed: an integer, 1 to 1024",
        ),
        (
            "pools: {small: {role: decode, worker: 1}}",
            "pools.small.worker: found an unknown option; allowed: role, workers, acceler",
        ),
        (
            "pools: {Small-1: {role: decode}}",
            "pools.Small-1: found the pool name 'Small-1'; allowed: a lower-case letter, then",
        ),
        (
            "pools: {my pool: {role: decode, workers: 1}}",
            "pools.my pool: found the pool name 'my pool'; allowed: a lower-case letter, then",
        ),
        (
            'pools: {"": {role: decode, workers: 1}}',
            "pools: found the pool name ''; allowed: a lower-case letter, then",
        ),
        ('pools: {"": }', "pools: found the pool name ''; allowed: a lower-case letter, then"),
        ("pools: {my pool: {workers: 1}}", "pools.my pool: found the pool name 'my pool'"),
        (
            "pool: {small: {role: decode}}",
            "pool.small.role: found an unknown option; allowed: those of `pagewire serve "
            "--help`; did you mean pools.small.role?",
        ),
        (
            "pools: {decode: {workers: 2}}",
            "pools.decode.workers: found 2; allowed: none, because the option decode says it",
        ),
        (
            "pools: {decode: {role: prefill}}",
            "pools.decode.role: found 'prefill'; allowed: none, because its name says it",
        ),
        (
            "pools: {decode: {accelerator_type: H100}}",
            "pools.decode.accelerator_type: found 'H100'; allowed: none without ray_address",
        ),
        (
            "{ray_address: auto, device: cpu, pools: {decode: {accelerator_type: H100}}}",
            "pools.decode.accelerator_type: found 'H100'; allowed: none with device cpu",
        ),
        (
            "{ray_address: auto, pools: {decode: {resources: {GPU: 1}}}}",
            "pools.decode.resources: found {'GPU': 1}; allowed: a mapping of custom resources of R",
        ),
        (
            "{ray_address: auto, pools: {decode: {resources: {rack: 1.5}}}}",
            "pools.decode.resources: found {'rack': 1.5}; allowed: a mapping of custom resources",
        ),
        (
            "{prefill: 0, pools: {prefill: {num_pages: 64, cpu_pages_mib: 64}}}",
            "pools.prefill: found options; allowed: none with prefill 0, because this pool has no",
        ),
        (
            "{prefill: 0, pools: {early: {role: prefill}}}",
            "pools.early.role: found 'prefill'; allowed: decode with prefill 0",
        ),
        (
            "{prefill: 0, pools: {early: {role: prefill, workers: 2}}}",
            "pools.early.role: found 'prefill'; allowed: decode with prefill 0",
        ),
        (
            "pools: {decode: {max_step_tokens: 256}}",
            "pools.decode.max_step_tokens: found 256; allowed: more than decode_worker.max_running",
        ),
        (
            "{workers_per_gpu: 2, pools: {small: {role: decode}}}",
            "pools.small.role: found 'decode'; allowed: no further pools with workers_per_gpu",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_told_by_its_option(tmp_path, text, told):
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as refusal:
        load_config(path, {})

    [line] = str(refusal.value).splitlines()
    assert line.startswith(f"{path}, line 1: {told}")


def test_defaults_of_a_command_see_what_is_given(tmp_path):
    seen = {}

    def defaults(given):
        seen.update(given)
        return {}

    load_config(write(tmp_path, "router: {max_resumptions: 1}"), {"prefill": 2}, defaults)

    assert seen == {"router.max_resumptions": 1, "prefill": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefil: 2", ["prefil: found an unknown option", "did you mean prefill?"]),
        ("router: {max_resumption: 2}", ["router.max_resumption", "router.max_resumptions?"]),
        (
            "max_resumptions: 2",
            ["max_resumptions: found an unknown option", "router.max_resumptions?"],
        ),
        ("router: {router_id: x}", ["router.router_id: found an unknown option"]),
        ("zebra: 2", ["zebra: found an unknown option", "pagewire serve --help"]),
        (
            "router: 3",
            ["router: found 3; allowed: a mapping of the options of this section, such as"],
        ),
        (
            "router:",
            ["router: found nothing; allowed: a mapping", "such as router.max_active_requests"],
        ),
        ("prefill:", ["prefill: found nothing; allowed: an integer, 0 to 1024"]),
        ("prefill: {}", ["prefill: found {}; allowed: an integer, 0 to 1024"]),
        ("host:", ["host: found nothing; allowed: a host name or an address"]),
        ("ray_address: 3", ["ray_address: found 3; allowed: host:port"]),
        (f"ray_address: h:{'9' * 5000}", ["ray_address: found 'h:99", "allowed: host:port"]),
        ("insecure: maybe", ["insecure: found 'maybe'; allowed: true or false"]),
        ("stop_grace_s: .inf", ["stop_grace_s: found inf; allowed: a finite number, 0 to 2592000"]),
        (
            "gpu_memory_fraction: 2",
            ["gpu_memory_fraction: found 2; allowed: a finite number above 0, up"],
        ),
        ("cpu_threads: 1.5", ["cpu_threads: found 1.5; allowed: an integer, 1 or more"]),
        (
            "router: {dead_after_s: }",
            ["router.dead_after_s: found nothing; allowed: a finite number above 0"],
        ),
        ("transfer: {post_s: x}", ["transfer.post_s: found 'x'; allowed: a finite number above 0"]),
        (
            "router: {max_resumptions: x}",
            ["router.max_resumptions: found 'x'; allowed: an integer, 0 or"],
        ),
        (
            "decode_worker: {max_step_tokens: x}",
            [": found 'x'; allowed: an integer, greater than decode_worker.max_running_sequences"],
        ),
        (
            "prefill: -1",
            ["cluster.yaml, line 1: prefill: found -1; allowed: an integer, 0 to 1024"],
        ),
        ("prefill: many", ["prefill: found 'many'; allowed: an integer, 0 to 1024"]),
        ("page_size: 24", ["page_size: found 24", "16, 32, 64 or 128"]),
        ("device: tpu", ["device: found 'tpu'", "'auto', 'cpu' or 'cuda'"]),
        ("port: 70000", ["port: found 70000; allowed: an integer, 0 to 65535"]),
        ("router: {max_active_requests: 0}", ["router.max_active_requests: found 0"]),
        ("router: {dead_after_s: .nan}", ["router.dead_after_s: found nan"]),
        ("transfer: {post_s: -1}", ["cluster.yaml, line 1: transfer.post_s: found -1", "above 0"]),
        ("decode_worker: {heartbeat_s: .inf}", ["decode_worker.heartbeat_s: found inf", "finite"]),
        ("prefill_worker: {max_overtaken_s: -2}", ["max_overtaken_s: found -2", "0 or"]),
        (
            "decode_worker: {max_running_sequences: 900, max_step_tokens: 900}",
            [
                "cluster.yaml, line 1: decode_worker.max_step_tokens: found 900; allowed: more "
                "than decode_worker.max_running_sequences, which is 900"
            ],
        ),
        (
            "transfer: {idle_s: 0.001}",
            [
                "cluster.yaml, line 1: transfer.idle_s: found 0.001; allowed: more than "
                "transfer.grant_s, which is 10.0"
            ],
        ),
        (
            "port: 9\nhttp_port: 9",
            ["http_port: found 9; allowed: a port other than port, which is the ro"],
        ),
        (
            "port: 8000",
            [
                "cluster.yaml, line 1: http_port: found 8000; allowed: a port other than port, "
                "which is the router's; http_port is not given and has its default"
            ],
        ),
        ("http_port: 70000", ["http_port: found 70000; allowed: an integer, 0 to 65535"]),
        (
            "http_gateway: {max_prompts: 0}",
            ["http_gateway.max_prompts: found 0; allowed: an integer, 1 or more"],
        ),
        ('prefill: "1"', ["prefill: found '1'; allowed: an integer, 0 to 1024"]),
        ("prefill: 2.0", ["prefill: found 2.0; allowed: an integer, 0 to 1024"]),
        ("insecure: 1", ["insecure: found 1; allowed: true or false"]),
        ('insecure: "no"', ["insecure: found 'no'; allowed: true or false"]),
        (
            "router: {max_resumptions: '2'}",
            ["router.max_resumptions: found '2'; allowed: an integer, 0 or more"],
        ),
        (
            'transfer: {post_s: "3"}',
            ["transfer.post_s: found '3'; allowed: a finite number above 0"],
        ),
        (
            "stop_grace_s: false",
            ["stop_grace_s: found false; allowed: a finite number, 0 to 2592000"],
        ),
        ("prefill: true", ["prefill: found true; allowed: an integer, 0 to 1024"]),
        ("prefill: yes", ["prefill: found yes, which YAML takes for true; allowed: an integer"]),
        ("prefill: Off", ["prefill: found Off, which YAML takes for false; allowed: an integer"]),
        (
            "served_model_name: 2026-11-29",
            ["served_model_name: found 2026-11-29, which YAML takes for a date; allowed: a text"],
        ),
        ("start_timeout_s: .nan", ["start_timeout_s: found nan; allowed: a finite number above 0"]),
        ("served_model_name: 8", ["served_model_name: found 8; allowed: a text of at most 1024"]),
        ("served_model_name: [a]", ["served_model_name: found ['a']; allowed: a text of at most"]),
        ("model: 5", ["model: found 5; allowed: the path of a checkpoint folder or GGUF file"]),
        (
            r'model: "/a\xff\udcff"',
            [r"model: found '/aÿ\udcff'; allowed: the path of a checkpoint"],
        ),
        (
            'model: ""',
            [
                "cluster.yaml, line 1: model: found ''; "
                "allowed: the path of a checkpoint folder or GGUF file"
            ],
        ),
        ("host: 0.0.0.0:80", ["host: found '0.0.0.0:80'", "without a port"]),
        ("host: ''", ["host: found ''", "allowed: a host name or an address"]),
        (
            "model_paths: {gpu-a: /models/tiny}",
            ["model_paths: found {'gpu-a': '/models/tiny'}; allowed: none without ray_address"],
        ),
        (
            "model_paths: /models",
            ["model_paths: found '/models'; allowed: a mapping of addresses,"],
        ),
        (
            "model_paths: {gpu-a: tiny}",
            ["model_paths: found {'gpu-a': 'tiny'}", "absolute paths, as"],
        ),
        ("model_paths: {gpu-a: }", ["model_paths: found {'gpu-a': None}; allowed: a mapping of"]),
        ("model_paths: {gpu-a: {b: /x}}", ["allowed: a mapping of addresses, names or res"]),
        ("model_paths: {'': /models}", ["model_paths: found {'': '/models'}; allowed: a mapping"]),
        (
            "ray_address: auto\nmodel_paths:\n  a: /x\n  a: /y",
            ["model_paths.a is given twice, in lines 3 and 4; give it once"],
        ),
        ("model_path: {a: /x}", ["model_path.a: found an unknown option"]),
        (
            "network_interface: eth0,eth1",
            ["network_interface: found 'eth0,eth1'; allowed: the name"],
        ),
        ("nccl_interface: [ib0]", ["nccl_interface: found ['ib0']; allowed: the name of one netw"]),
        (
            "ray_address: auto\nworkers_per_gpu: 2",
            ["workers_per_gpu: found 2", "allowed: 1 with ray_address"],
        ),
        (
            "device: cpu\nworkers_per_gpu: 2",
            ["workers_per_gpu: found 2; allowed: 1 with device cpu"],
        ),
        (
            "device: cpu\npage_transport: nccl",
            ["page_transport: found 'nccl'; allowed: auto with device cpu"],
        ),
        (
            "device: cpu\nnccl_interface: ib0",
            ["nccl_interface: found 'ib0'; allowed: none with device cpu"],
        ),
        (
            "tls: {server_name: workers, allow_plain_nccl: true}",
            [
                "tls.server_name: found 'workers'; allowed: 'pagewire' without tls.certificate_fi",
                "tls.allow_plain_nccl: found true; allowed: false without tls.certificate_file",
            ],
        ),
        (
            "pool_resources: true\ndevice: cpu",
            ["pool_resources: found true", "allowed: false without ray_address"],
        ),
        (
            "pool_resources: true\nray_address: auto",
            ["device: found 'auto'", "allowed: cpu or cuda with pool_resources"],
        ),
        *(
            (
                f"insecure: true\nfront_tls: {{certificate_file: a, key_file: b{authority}}}\n"
                f"tls: {{certificate_file: c, key_file: d, authority_file: e}}{tenants}",
                ["cluster.yaml, line 1: insecure: found true; allowed: false with the certificate"],
            )
            for authority, tenants in (
                (", client_authority_file: f", ""),
                ("", "\nrouter: {tenants_file: g}"),
            )
        ),
        ("ray_address: head", ["ray_address: found 'head'", "host:port"]),
        ("ray_address: ray://head:1", ["ray_address: found 'ray://head:1'", "host:port"]),
        ("ray_address: head:99999", ["ray_address: found 'head:99999'", "host:port"]),
        (
            "prefill: 1\ndecode: 2\nprefill: 3",
            ["prefill is given twice, in lines 1 and 3; give it once"],
        ),
        ("router: {dead_after_s: 1, dead_after_s: 2}", [": router.dead_after_s is given twice"]),
        ("router: {dead_after_s: 1}\nrouter.dead_after_s: 2", ["given twice, in lines 1 and 2;"]),
        ("true: 1", ["true: found an unknown option; allowed: those of `"]),
        ("router: {true: 3}", ["router.true: found an unknown option; allowed: those of `"]),
        ("router: {on: 3}", ["router.on: found an unknown option; allowed: those of `"]),
        ("router: {null: 1}", ["router.null: found an unknown option; allowed: those of `"]),
        ("0x7: 1", ["0x7: found an unknown option; allowed: those of `"]),
        (
            "router: &r {max_resumptions: 1, <<: {no: 2}}",
            ["router.no: found an unknown option; allowed: those of `"],
        ),
        (
            "router: {max_request: 3}",
            ["router.max_request: found an unknown option; allowed: those of `"],
        ),
        (
            "prefill_worker: {st: 3}",
            ["prefill_worker.st: found an unknown option; allowed: those of `"],
        ),
        # For gRPC, a call with such a time limit has expired when it begins.
        (
            "router: {connect_timeout_s: 1e10}\ntransfer: {connect_s: 1e10}",
            [
                "line 1: router.connect_timeout_s: found 10000000000.0; allowed: a finite number, ",
                "line 2: transfer.connect_s: found 10000000000.0; allowed: a finite number above 0",
            ],
        ),
        ("ports: 1", ["did you mean port?"]),
        ("loglevel: info", ["did you mean log_level?"]),
        ("tls: {key: x}", ["did you mean tls.key_file?"]),
        ("front_tls: {authority: x}", ["front_tls.authority: found an unknown option; allowed"]),
        ("prefill: {heartbeat: 1}", ["did you mean prefill_worker.heartbeat_s?"]),
        ("decode: {heartbeat_s: 1}", ["did you mean decode_worker.heartbeat_s?"]),
        (
            "- prefill",
            ["cluster.yaml: found a list at the top level; allowed: a mapping of options"],
        ),
        ("prefill", ["cluster.yaml: found a text at the top level; allowed: a mapping"]),
        ("prefill: [", ["cluster.yaml, line 1, column 11: is not plain YAML: expected the node"]),
        ("model: !!python/name:os.system", ["line 1, column 8: is not plain YAML: could not"]),
        ("router: !!map [1]", ["line 1, column 9: is not plain YAML: expected a mapping node"]),
        (
            "port: 1\n---\nport: 2",
            ["line 2, column 1: is not plain YAML: expected a single document in the stream, but"],
        ),
        (
            "host: &a x\nmodel: &a y",
            ["line 2, column 8: is not plain YAML: found duplicate anchor"],
        ),
        ("model: \x01", ["cluster.yaml: is not plain YAML: unacceptable character #x0001"]),
        ("router: &a {b: *a}", ["cluster.yaml: has a mapping that contains itself, by an anchor"]),
        ("model: " + "[" * 1000, ["cluster.yaml: is nested too deeply"]),
        ("router: " + "{a: " * 1000 + "1" + "}" * 1000, ["cluster.yaml: is nested too deeply"]),
        ("- " * 1000, ["cluster.yaml: is nested too deeply"]),
        pytest.param(
            "port: 0x" + "f" * 5000,
            ["line 1, column 7: is not plain YAML: found a value that can"],
            id="digits",
        ),
        ('secret_file: "a\\0b"', ["line 1, column 14: is not plain YAML: found a value that can"]),
        (
            'secret_file: "\\ud800"',
            ["line 1, column 14: is not plain YAML: found a value that can"],
        ),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, words):
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load_config(path, {})

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "repeat", ["[{0}, {0}, {0}]", "{{a: {0}, b: {0}, c: {0}}}", "{{<<: [{0}, {0}, {0}]}}"]
)
def test_aliases_that_repeat_billions_of_values_are_refused_at_once(tmp_path, repeat):
    names = [f"x{number}" for number in range(21)]
    lines = [f"{name}: &{name} {repeat.format(f'*{last}')}" for last, name in pairwise(names)]
    path = write(tmp_path, "\n".join(["x0: &x0 {a: 1}", *lines]))

    with pytest.raises(
        ConfigError, match="yaml: found too many values through aliases; allowed: at"
    ):
        load_config(path, {})


def test_aliases_may_repeat_what_people_write(tmp_path):
    path = write(tmp_path, "prefill_worker: &each {heartbeat_s: 0.25}\ndecode_worker: *each")

    assert load_config(path, {}).decode_worker.heartbeat_s == 0.25


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"model: caf\xe9\n")

    with pytest.raises(
        ConfigError, match="yaml: byte 0xe9 at offset 10 is not UTF-8; allowed: YAML"
    ):
        load_config(path, {})


def test_errors_say_where_the_value_came_from(tmp_path):
    path = write(tmp_path, "prefill: -1")

    with pytest.raises(ConfigError) as caught:
        load_config(path, {"decode": 0})

    assert f"{path}, line 1: prefill: found -1" in str(caught.value)
    assert str(caught.value).startswith("--decode: found 0")


def test_all_errors_are_told_at_once(tmp_path):
    lines = "prefil: 2\nport: -1\nzebra: 1\n"
    sections = "router: {dead_after_s: 0,\n  max_index_pages: many,\n  max_resumptions: -1}\n"
    path = write(tmp_path, lines + sections)

    with pytest.raises(ConfigError) as caught:
        load_config(path, {"decode_worker.max_step_tokens": 9, "transfer.ack_s": -1.0})

    named = [line.split("; ")[0] for line in str(caught.value).splitlines()]
    assert sorted(named[:2]) == [
        "--decode-worker-max-step-tokens: found 9",
        "--transfer-ack-s: found -1.0",
    ]
    assert named[2:] == [
        f"{path}, line 1: prefil: found an unknown option",
        f"{path}, line 2: port: found -1",
        f"{path}, line 3: zebra: found an unknown option",
        f"{path}, line 4: router.dead_after_s: found 0",
        f"{path}, line 5: router.max_index_pages: found 'many'",
        f"{path}, line 6: router.max_resumptions: found -1",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param(
            "device: cpu\nray_address: auto\npool_resources: true\n"
            "pools: {far: {role: decode, accelerator_type: L4}}\n",
            ["line 4: pools.far.accelerator_type: found 'L4'; allowed: none with device cpu"],
            id="device-contradicts",
        ),
        pytest.param(
            "device: gpu\nray_address: auto\npool_resources: true\n",
            ["line 1: device: found 'gpu'; allowed: 'auto', 'cpu' or 'cuda'"],
            id="device-does-not-exist",
        ),
        pytest.param(
            "tls: {certificate_file: c, authority_file: a, key_file: ''}\n"
            "router: {tenants_file: t}\nworker_metrics_ports: 9401-9408\n",
            ["line 1: tls.key_file: found none; allowed: a file, as tls.certificate_file and "],
            id="certificate-without-key",
        ),
        pytest.param(
            "port: 5\nhttp_port: 5\ncontroller_port: 5\n",
            ["line 2: http_port: found 5", "line 3: controller_port: found 5"],
            id="all-of-the-first-check",
        ),
    ],
)
def test_no_error_follows_from_another_ones_value(tmp_path, text, told):
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load_config(path, {})

    lines = str(caught.value).splitlines()
    assert len(lines) == len(told), lines
    for line, begin in zip(lines, told, strict=True):
        assert line.startswith(f"{path}, {begin}")


@pytest.mark.parametrize(
    "text",
    [
        "decode: 1\nrouter:\n  # of wrong type\n  max_resumptions: x",
        "decode: 1\nrouter:\n  # out of range\n  max_resumptions:\n    -1",
        "decode: 1\nrouter:\n  # unknown\n  max_resumption: 1",
        "decode: 1\n\n\nrouter.max_resumptions: -1",
        "decode: 1\nrouter:\n  <<:\n    max_resumptions: -1",
        "decode: 1\n# a rule of two\nray_address: auto\nworkers_per_gpu: 2",
    ],
)
def test_errors_say_in_which_line_of_the_file_the_option_is(tmp_path, text):
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load_config(path, {})

    assert str(caught.value).startswith(f"{path}, line 4: ")


def test_keys_given_twice_hide_no_other_error(tmp_path):
    sections = "router: {dead_after_s: 3, dead_after_s: 0}\ntransfer.ack_s: 1\n"
    path = write(tmp_path, f"prefill: 1\nprefill: 2\nzebra: 1\n{sections}transfer: {{ack_s: 2}}")

    with pytest.raises(ConfigError) as caught:
        load_config(path, {"decode": 0})

    assert [line.split("; ")[0] for line in str(caught.value).splitlines()] == [
        "--decode: found 0",
        f"{path}: prefill is given twice, in lines 1 and 2",
        f"{path}, line 3: zebra: found an unknown option",
        f"{path}: router.dead_after_s is given twice, in lines 4 and 4",
        f"{path}, line 4: router.dead_after_s: found 0",
        f"{path}: transfer.ack_s is given twice, in lines 5 and 6",
    ]


def test_the_name_of_a_model_is_no_longer_than_routers_accept():
    with pytest.raises(ConfigError, match="allowed: a text of at most 1024 characters"):
        load_config(None, {"served_model_name": "m" * 1025})


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\x07", " ", "a ", "\u2028", "\ud800"])
def test_the_name_of_a_model_can_stand_in_a_line(name):
    with pytest.raises(ConfigError, match="characters that can be printed, no blank"):
        load_config(None, {"served_model_name": name})

    assert load_config(None, {"served_model_name": "org/é ü"}).served_model_name == "org/é ü"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"router.dead_after_s": 0.9},
            "--router-dead-after-s: found 0.9; allowed: at least twice prefill_worker.heartbeat_s",
        ),
        (
            {"decode_worker.heartbeat_s": 8.0},
            "router.dead_after_s: found 15.0; allowed: at least twice --decode-worker-heartbeat-s",
        ),
    ],
)
def test_workers_are_not_dead_between_two_heartbeats(options, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, options)

    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        ("", {"host": ""}, "--host: found ''; allowed: a host name or an address, without a port"),
        ("", {"host": "a:1", "port": 1}, "--host: found 'a:1'; allowed: a host name or an address"),
        ("", {"dtype": "page_size x", "page_size": 16}, "--dtype: found 'page_size x'; allowed"),
        (
            "ray_address: auto",
            {"workers_per_gpu": 2},
            "--workers-per-gpu: found 2; allowed: 1 with ray_address, where",
        ),
        (
            "workers_per_gpu: 2",
            {"ray_address": "auto"},
            "workers_per_gpu: found 2; allowed: 1 with --ray-address, where",
        ),
        (
            "",
            {"decode_worker.max_running_sequences": 900, "decode_worker.max_step_tokens": 900},
            "--decode-worker-max-step-tokens: found 900; allowed: more than "
            "--decode-worker-max-running-sequences, which is 900",
        ),
        (
            "router: {tenants_file: tenants.yaml}",
            {"worker_metrics_ports": "9401-9402"},
            "--worker-metrics-ports: found '9401-9402'; allowed: none with router.tenants_file and "
            "without tls.certificate_file, because tenants may not see workers",
        ),
    ],
)
def test_options_of_the_command_line_are_named_as_they_stand_there(tmp_path, text, options, line):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), options)

    assert line in str(caught.value)
    assert not str(caught.value).startswith("command line")


def test_the_home_of_an_unknown_user_is_refused_beside_other_errors(tmp_path):
    path = write(tmp_path, "router: {tenants_file: ~no-such-user/t}\nlog_level: loud")

    with pytest.raises(ConfigError) as caught:
        load_config(path, {"port": -1})
    told = "found '~no-such-user/t'; allowed: a path, with ~ only for a user whose home is known"
    assert f"{path}, line 1: router.tenants_file: {told}" in str(caught.value)
    assert "log_level: found 'loud'" in str(caught.value)
    with pytest.raises(ConfigError, match=f"^--router-tenants-file: {re.escape(told)}$"):
        load_config(None, {"router.tenants_file": "~no-such-user/t"})


def test_insecure_may_open_a_cluster_with_all_certificates_to_whoever_connects(tmp_path):
    text = (
        "insecure: true\nfront_tls: {certificate_file: a, key_file: b}\n"
        "tls: {certificate_file: c, key_file: d, authority_file: e}"
    )
    assert load_config(write(tmp_path, text), {}).insecure


@pytest.mark.parametrize("host", ["0.0.0.0", "gpu-7.example.org", "::1"])
def test_addresses_without_a_port_are_hosts(host):
    assert load_config(None, {"host": host}).host == host


def test_the_router_is_on_the_interface_unless_somebody_says_where(tmp_path):
    path = write(tmp_path, "network_interface: eth0")

    assert load_config(path, {}).host == ""
    assert load_config(path, {"host": "127.0.0.1"}).host == "127.0.0.1"
    assert load_config(None, {}).host == "127.0.0.1"


def test_paths_of_the_model_are_one_option(tmp_path):
    text = "ray_address: auto\nmodel_paths:\n  10.0.0.2: /data/tiny\n  gpu-b: /mnt/tiny\n"
    path = write(tmp_path, text)

    of_file = {"10.0.0.2": "/data/tiny", "gpu-b": "/mnt/tiny"}
    assert load_config(path, {}).model_paths == of_file
    assert load_config(path, {"model_paths": {"gpu-b": "/x"}}).model_paths == {"gpu-b": "/x"}
    assert load_config(None, {}).model_paths is None


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.1:6379", "head-0:6379", "[fd00::1]:6379"])
def test_ray_addresses_have_a_port(address):
    assert load_config(None, {"ray_address": address}).ray_address == address


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: .*; allowed: YAML"):
        load_config(tmp_path / "absent.yaml", {})


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_without_options_is_told_from_an_empty_one(tmp_path, name):
    assert load_config(write(tmp_path, f"{name}: {{}}"), {}) == ClusterConfig()
    with pytest.raises(
        ConfigError, match=f"{name}: found nothing; allowed: a mapping of the options"
    ):
        load_config(write(tmp_path, f"{name}:"), {})


def test_bounds_of_every_number_are_known():
    numbers = [each for each in config_options().values() if each.value_type in (int, float)]

    words = r"\d+ (or more|to \d+)|above 0|, greater than|, 64 or 128$|, -1 or 0 for off$"
    assert [each.path for each in numbers if not re.search(words, each.allowed())] == []


def test_every_option_is_described():
    bare = [path for path, option in config_options().items() if not option.description]
    assert bare == []


def test_configuration_page_is_up_to_date():
    hint = "run make docs"
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), hint
