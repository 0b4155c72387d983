from __future__ import annotations

from perfsearch.tracking.redact import Redactor

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
    assert Redactor({}).text("see http://me:pw@host/x") == "see http://***@host/x"
