"""Mistakes in a command are one line: what is wrong, and what was most likely meant."""

import subprocess
import sys

import pytest

from vllm_latq.cli.main import EXAMPLES, build_parser, main
from vllm_latq.cli.parser import PEER_OPTIONS

QUANTIZE = ["quantize", "MODEL", "OUT"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantise"], "'quantise' is not a command. Did you mean quantize? Commands: plan, trace, quantize, eval, "),
        (["--versoin"], "--versoin is not an option of latq. Did you mean --version?"),
        ([*QUANTIZE, "--bitz", "4"], "--bitz is not an option of latq quantize. Did you mean --bits?"),
        ([*QUANTIZE, "--bitz=4"], "--bitz is not an option of latq quantize. Did you mean --bits?"),
        (["eval", "M", "--engine-args", "[1]"], "--engine-args: expected a JSON object, found '[1]'."),
        (["trace", "M"], "the following arguments are required: -o/--output."),
        ([*QUANTIZE, "--xyzzy"], "--xyzzy is not an option of latq quantize."),
        ([*QUANTIZE, "--wbits", "4"], "--wbits is not an option of latq quantize; its name here is --bits."),
        (["quantize", "--dataset", "c4", "M", "O"], "--dataset is not an option of latq quantize; its name here"),
        ([*QUANTIZE, "--group_size", "64"], "--group_size is not an option of latq quantize; its name here"),
        ([*QUANTIZE, "--desc_act"], "--desc_act is not an option of latq quantize; its name here is --order act."),
        (["quantize", "--model", "M"], "--model is not an option of latq quantize; give MODEL without an option."),
        ([*QUANTIZE, "--method", "gpqt"], "--method: expected one of latq, "),
        ([*QUANTIZE, "--method", "gpqt"], "found 'gpqt'. Did you mean gptq?"),
        ([*QUANTIZE, "--method", "awq"], "found 'awq'. See latq quantize --help."),
        ([*QUANTIZE, "--bits", "four"], "--bits: expected a number, found 'four'."),
        ([*QUANTIZE, "--seq-len", "1.5"], "--seq-len: expected a whole number, found '1.5'."),
        (["quantize", "MODEL"], "the following arguments are required: OUT. See latq quantize --help."),
        (["eval", "M", "--model_args", "x"], "--model_args is not an option of latq eval; give MODEL_OR_CKPT without"),
        (["verify", "M", "--calibration_dataset", "x"], "its name here is --calibration."),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("latq: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_our_own_options_and_their_beginnings_are_accepted() -> None:
    options = build_parser().parse_args([*QUANTIZE, "--bits=3", "--calib", "c4", "--ignore", "a", "b", "-v"])
    assert (options.bits, options.calibration, options.ignore, options.verbose) == (3, "c4", ["a", "b"], True)


def test_names_of_peers_lead_to_options_of_ours() -> None:
    """Every target exists, and no name is one of ours."""
    commands = build_parser()._commands[0].choices
    known = {name for command in commands.values() for name in command._option_string_actions}
    known |= {str(action.metavar) for command in commands.values() for action in command._actions}
    assert {target.partition(" ")[0] for target in PEER_OPTIONS.values()} <= known
    assert not {f"--{name}" for name in PEER_OPTIONS} & set(commands["quantize"]._option_string_actions)


def test_no_command_shows_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert EXAMPLES in shown
    assert "quantize a model into a checkpoint" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_names_commands_options_and_choices(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--print-completion", shell])
    assert not left.value.code
    script = capsys.readouterr().out
    for name in ("quantize", "inspect", "group-size", "ssqr"):
        assert name in script


def test_completion_in_bash(tmp_path: str) -> None:
    """Bash itself completes a command, an option and a choice."""
    program = """
    eval "$(python_latq --print-completion bash)"
    ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_latq; echo "${COMPREPLY[@]}"; }
    ask latq qua; ask latq quantize --group; ask latq quantize --method h
    """.replace("python_latq", f"{sys.executable} -m vllm_latq.cli.main")
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["quantize", "--group-size", "hptq hrtn"], done.stderr


def test_help_starts_without_torch() -> None:
    program = "import sys; from vllm_latq.cli.main import main; main([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
