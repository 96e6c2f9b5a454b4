"""Completion scripts of bash, zsh and fish: names of commands, then keys, and after a key its values or files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid_rlhf.configs.commands.machine import Shell

_OPTIONS = ("--config", "--help", "--help-all", "--json")
_WITHOUT_VALUE = "--help|--help-all|--json|--version"


@dataclass(frozen=True)
class CompletedCommand:
    """Words that may follow a command on the command line."""

    words: tuple[str, ...]
    """The command: () is the program itself, ("data", "check") a subcommand."""
    subcommands: dict[str, str]
    """Names of the subcommands, with a line of help each."""
    keys: dict[str, list[str]]
    """Dotted keys with their choices; [] if the choices are not listed."""
    choices: list[str]
    """Choices of its first positional word; [] if they are not listed."""

    @property
    def path(self) -> str:
        """The words, joined by spaces."""
        return " ".join(self.words)

    def following(self) -> list[str]:
        """Names or options that may follow the command."""
        if self.subcommands:
            return [*self.subcommands, "--help", "--json", *(["--version"] if not self.words else [])]
        return [*self.choices, *(f"--{key}" for key in self.keys), *_OPTIONS]

    @property
    def takes_word(self) -> bool:
        """True if a known word may follow."""
        return bool(self.subcommands or self.choices)


def bash_script(program: str, commands: Sequence[CompletedCommand]) -> str:
    """The script for bash 3.2 and later."""
    name = _function_name(program)
    return f"""\
# Completion of {program} for bash.
{_lists(name, commands)}
{name}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} found="" word index
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${{COMP_WORDS[index]}}
        [[ $word == -* ]] && break
        {name}_is_command "$found" || break
        found="${{found:+$found }}$word"
    done
    COMPREPLY=()
    if [[ $previous == --* ]] && ! [[ $previous =~ ^({_WITHOUT_VALUE})$ ]]; then
        local values
        values=$({name}_values "$found $previous")
        [[ -n $values ]] && COMPREPLY=($(compgen -W "$values" -- "$current"))
    elif [[ $current == -* ]] || {name}_is_command "$found"; then
        COMPREPLY=($(compgen -W "$({name}_following "$found")" -- "$current"))
    fi
}}
complete -o bashdefault -o default -F {name} {program}"""


def zsh_script(program: str, commands: Sequence[CompletedCommand]) -> str:
    """The script for zsh, which can be sourced or be a file of $fpath."""
    name = _function_name(program)
    return f"""\
#compdef {program}
# Completion of {program} for zsh.
{_lists(name, commands)}
{name}() {{
    local current=${{words[CURRENT]}} previous=${{words[CURRENT - 1]}} found="" word index
    for ((index = 2; index < CURRENT; index++)); do
        word=${{words[index]}}
        [[ $word == -* ]] && break
        {name}_is_command "$found" || break
        found="${{found:+$found }}$word"
    done
    if [[ $previous == --* ]] && ! [[ $previous =~ '^({_WITHOUT_VALUE})$' ]]; then
        local values
        values=$({name}_values "$found $previous")
        if [[ -n $values ]]; then compadd -- ${{=values}}; else _files; fi
    elif [[ $current == -* ]] || {name}_is_command "$found"; then
        compadd -- ${{=$({name}_following "$found")}}
    else
        _files
    fi
}}
if [[ $funcstack[1] == {name} ]]; then {name} "$@"; else compdef {name} {program}; fi"""


def fish_script(program: str, commands: Sequence[CompletedCommand]) -> str:
    """The script for fish."""
    name = _function_name(program)
    parents = "|".join(shlex.quote(command.path) for command in commands if command.takes_word)
    lines = [
        f"# Completion of {program} for fish.",
        f"function {name}_at",
        "    set -l found ''",
        "    set -l words (commandline -opc)",
        "    for word in $words[2..-1]",
        "        string match -q -- '-*' $word; and break",
        f'        contains -- "$found" {parents.replace("|", " ")}; or break',
        '        set found (string trim -- "$found $word")',
        "    end",
        '    test "$found" = "$argv[1]"',
        "end",
    ]
    for command in commands:
        line = f"complete -c {program} -n {shlex.quote(f'{name}_at {shlex.quote(command.path)}')}"
        lines += [
            f"{line} -f -a {shlex.quote(sub)} -d {_fish_text(about)}" for sub, about in command.subcommands.items()
        ]
        lines += [f"{line} -f -a {shlex.quote(' '.join(command.choices))}"] if command.choices else []
        for key, choices in command.keys.items():
            values = f"-x -a {shlex.quote(' '.join(choices))}" if choices else "-r"
            lines.append(f"{line} -l {shlex.quote(key)} {values}")
    lines += [f"complete -c {program} -l {option.removeprefix('--')}" for option in _OPTIONS[1:]]
    return "\n".join([*lines, f"complete -c {program} -l config -r"])


SCRIPTS: dict[Shell, Callable[[str, Sequence[CompletedCommand]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}


def _lists(name: str, commands: Sequence[CompletedCommand]) -> str:
    """Shell functions that print the words that may follow a command, and the values of its keys."""
    parents = "|".join(shlex.quote(command.path) for command in commands if command.takes_word)
    following: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    for command in commands:
        following.setdefault(" ".join(command.following()), []).append(command.path)
        for key, choices in command.keys.items():
            if choices:
                values.setdefault(" ".join(choices), []).append(f"{command.path} --{key}")
    return "\n".join(
        [
            f"{name}_is_command() {{ case $1 in {parents}) return 0 ;; *) return 1 ;; esac; }}",
            *_printing(f"{name}_following", following),
            *_printing(f"{name}_values", values),
        ]
    )


def _printing(name: str, cases: dict[str, list[str]]) -> list[str]:
    """A shell function that prints the key of `cases` whose words contain its argument."""
    lines = [f"{'|'.join(map(shlex.quote, words))}) echo {shlex.quote(text)} ;;" for text, words in cases.items()]
    return [f"{name}() {{", "    case $1 in", *(f"        {line}" for line in lines), "    esac", "}"]


def _function_name(program: str) -> str:
    return f"_{program.replace('-', '_')}"


def _fish_text(text: str) -> str:
    """A text in fish's single quotes, in which a backslash and a quote are escaped."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
