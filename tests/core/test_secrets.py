"""What is taken for a secret, and that a command that holds one can be handed over."""

import os
import subprocess

import pytest

from perfsearch.core import secrets
from perfsearch.core.errors import BadInputError
from perfsearch.core.secrets import Redactor

ENVIRONMENT = {
    "HF_TOKEN": "hf_abcdef123456",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "SSH_AUTH_SOCK": "/run/agent/socket",
    "TOKENIZERS_PARALLELISM": "false",
    "HOME": "/home/someone",
}


def test_secrets_of_the_environment_are_masked_wherever_they_stand():
    redact = Redactor(ENVIRONMENT)
    assert redact.text("run --token=hf_abcdef123456 x") == "run --token=*** x"
    assert redact.data(b"key wJalrXUtnFEMI/K7MDENG\xff") == b"key ***\xff"


def test_settings_that_only_sound_like_secrets_stay():
    redact = Redactor(ENVIRONMENT)
    text = "static_graph=false, socket /run/agent/socket, /home/someone"
    assert redact.text(text) == text


def test_passwords_inside_of_addresses_are_masked():
    assert Redactor({}).text("see http://me:p/w@host/x") == "see http://***@host/x"


SECRET = [
    ("--token=V --lr=3", "--token=*** --lr=3"),
    ("--api_key V x", "--api_key *** x"),
    ('["--api_key", "V", "--x"]', '["--api_key", "***", "--x"]'),
    ("- --api-key\n- V\n- y", "- --api-key\n- ***\n- y"),
    ("Namespace(apiKey='V W', b=1)", "Namespace(apiKey='***', b=1)"),
    ("postgres://h/x?sslmode=1&password=V&a=1", "postgres://h/x?sslmode=1&password=***&a=1"),
    ("https://h/blob?sig=V%2F&a=1", "https://h/blob?sig=***&a=1"),
    ("Server=h;User=u;Password=V;Port=1", "Server=h;User=u;Password=***;Port=1"),
    ("AccountName=n;AccountKey=V==;", "AccountName=n;AccountKey=***;"),
    ("Authorization: Bearer abcdefghijklmnopqr", "Authorization: Bearer ***"),
    ('{"db_password": "a, b"}', '{"db_password": "***"}'),
    ("got hf_abcdefghijklmnopqrst in line 3", "got *** in line 3"),
    ("AKIAABCDEFGHIJKLMNOP", "***"),
]


@pytest.mark.parametrize(("text", "masked"), SECRET)
def test_a_secret_is_told_by_its_name_or_its_form(text, masked):
    assert Redactor({}).text(text) == masked
    assert Redactor({}).data(text.encode()) == masked.encode()
    assert Redactor({}).text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "--pad_token 0 --tokenizer gpt2 --max_tokens 512 --num_tokens=4 tokens_per_s=5",
        "--use_auth_token --push_to_hub",
        "--token null",
        "password: none",
        "rank 0: unknown token foo; the password is wrong",
        "design=5 author=me path=/x authority: y",
    ],
)
def test_other_words_stay(text):
    assert Redactor({}).text(text) == text


def test_a_value_may_begin_with_a_slash(tmp_path):
    redact = Redactor({"MY_TOKEN": "/Ab9+xyz/q8", "X_CREDENTIALS": str(tmp_path / "key.json")})
    assert redact.text(f"/Ab9+xyz/q8 {tmp_path}/key.json") == f"*** {tmp_path}/key.json"


def test_what_was_learned_from_a_command_is_masked_where_the_job_prints_it():
    secrets.learn(["train.py", "--token=learned9SECRET", "--password", "other9SECRET"])
    assert Redactor({}).text("401 for learned9SECRET, other9SECRET") == "401 for ***, ***"


COMMAND = [
    *("show.py", "--token=a b'c", "--api_key", "zz$9SECRET", "--lr=3"),
    *("Server=h;Password=p9SECRET;", "postgres://u:p9SECRET@h/x", "+auth.token=q9SECRET"),
]


def handed_over(tmp_path, answers="", **variables):
    """What a program sees that a shell script without secrets starts."""
    words, asks, names = secrets.in_shell(COMMAND, {"THEIR_KEY": "x", "HF_API_KEY": "zz$9SECRET"})
    script = "\n".join([*asks, " ".join(["printf '%s\\n'", *words])])
    assert "SECRET" not in script
    assert names == ["TOKEN", "HF_API_KEY", "ARGUMENT_5", "ARGUMENT_6", "AUTH_TOKEN"]
    file = tmp_path / "run.sh"
    file.write_text(script)
    done = subprocess.run(
        ["sh", str(file)],
        input=answers,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_command_that_is_handed_over_reads_secrets_from_variables(tmp_path):
    variables = {
        "TOKEN": "a b'c",
        "HF_API_KEY": "zz$9SECRET",
        "ARGUMENT_5": COMMAND[5],
        "ARGUMENT_6": COMMAND[6],
        "AUTH_TOKEN": "q9SECRET",
    }
    assert handed_over(tmp_path, **variables) == COMMAND


def test_and_asks_for_those_that_are_not_set(tmp_path):
    answers = f"a b'c\nzz$9SECRET\n{COMMAND[5]}\n{COMMAND[6]}\nq9SECRET\n"
    assert handed_over(tmp_path, answers) == COMMAND


def test_a_recorded_command_is_filled_from_the_environment_or_refused():
    recorded = Redactor({}).words(COMMAND)
    assert "SECRET" not in str(recorded)
    given = {"TOKEN": "a b'c", "API_KEY": "zz$9SECRET", "AUTH_TOKEN": "q9SECRET"}
    given |= {"ARGUMENT_5": COMMAND[5], "ARGUMENT_6": COMMAND[6]}
    assert secrets.filled(recorded, given, "workload.command") == COMMAND
    with pytest.raises(BadInputError, match="environment variable TOKEN to its value"):
        secrets.filled(recorded, {}, "workload.command")
