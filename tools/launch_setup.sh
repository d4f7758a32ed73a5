# SPDX-License-Identifier: Apache-2.0
# Shell code of launch_script.py, which every bash that a script starts reads first (BASH_ENV). Functions replace
# programs; command_not_found_handle handles words that name no program.
#
# $(...) removes the last newline of a text. It is added again, so that a backslash at the end does not join lines.
set -CT
_log() { { printf '%s\0' "$(( $# + 3 ))" "$PWD" "${CHECK_OUTER:-}" "${SLURM_NTASKS:-}" "$@"; } >> "$CHECK_LOG"; }
_called() {
    case "${1##*/}" in python|python3|python3.*) _answered "$@" && return 0 ;; esac
    _log "$@"
    case "${1##*/}" in
        nvidia-smi|rocm-smi) for _gpu in 0 1 2 3 4 5 6 7; do echo "GPU $_gpu"; done ;;
        scontrol) echo localhost ;;
        sbatch) _submit "${@:2}" ;;
        tee) _tee "${@:2}" ;;
        srun|mpirun|mpiexec|docker|podman|singularity|apptainer|enroot) _within "$@" ;;
        numactl|nohup|timeout|time|nice|ionice|stdbuf|sudo|env) _within "$@" ;;
    esac
    return 0
}
# The output of python -c, which is only run if the kernel confines it as it confines this shell.
_answered() {
    [ -n "$CHECK_PYTHON" ] || return 1
    shift
    while [ "${1:-}" = -u ]; do shift; done
    case "${1:-}" in -c|-) ;; *) return 1 ;; esac
    local text
    text=$(builtin eval "command $CHECK_PYTHON \"\$@\"" 2> /dev/null) && printf '%s\n' "$text"
}
_tee() {
    local text word add=">|"
    text=$(command cat; printf x); text=${text%x}
    printf '%s' "$text"
    for word in "$@"; do
        case "$word" in
            -a|--append) add=">>" ;;
            -*) ;;
            *) word=$(_elsewhere "$word"); if [ "$add" = ">>" ]; then printf '%s' "$text" >> "$word"
               else printf '%s' "$text" >| "$word"; fi ;;
        esac
    done
}
# A submitted job runs at once, with the variables that Slurm would set. A job that submits itself is not run again.
_submit() {
    local script="" text="" words=() slurm="" receipt="" chain=${CHECK_CHAIN:-}
    builtin eval "$(builtin eval "command $CHECK_SBATCH \"\$CHECK_FILES\" \"\$@\"")"
    case ":$chain:" in *":$script:"*) [ -z "$script" ] || { printf '%s\n' "$receipt"; return 0; } ;; esac
    if [ -n "$script" ]; then text=$(_filter < "$script") || return 0
    else text=$(printf '%s\n' "$text" | _filter); fi
    (
        export CHECK_CHAIN="$chain:$script" CHECK_OUTER=""
        builtin eval "$slurm"
        command "$CHECK_BASH" -c "$text"$'\n' "${script:-sbatch}" "${words[@]}"
    ) >&2
    printf '%s\n' "$receipt"
}
_within() {
    local outer="" word
    while [ $# -gt 0 ]; do
        case "${1##*/}" in
            bash|sh) shift; CHECK_OUTER="${CHECK_OUTER:-}$outer" _shell "$@"; return 0 ;;
            *.sh) if [ -f "$(_back "$1")" ]; then CHECK_OUTER="${CHECK_OUTER:-}$outer" _shell "$@"; return 0; fi ;;
        esac
        outer="$outer$1"$'\x1f'
        shift
    done
}
_filter() { builtin eval "command $CHECK_FILTER \"\$@\""; }
_shell() {
    export CHECK_OUTER
    local text flags=()
    while [ $# -gt 0 ]; do
        case "$1" in
            -c|-lc|-ic|-exc|-xc|-ec) text=$(printf '%s\n' "$2" | _filter); shift 2
                command "$CHECK_BASH" "${flags[@]}" -c "$text"$'\n' "$@"; return ;;
            -l|-i|--login|-) shift ;;
            -o) flags+=("$1" "$2"); shift 2 ;;
            -*) flags+=("$1"); shift ;;
            *) break ;;
        esac
    done
    [ $# -gt 0 ] || return 0
    text=$(_filter < "$(_back "$1")") || return 0
    command "$CHECK_BASH" "${flags[@]}" -c "$text"$'\n' "$@"
}
_elsewhere() {
    case "$1" in
        /dev/null|/dev/std*|/dev/fd/*|/dev/tty|"$CHECK_FILES"*|"") printf '%s' "$1"; return ;;
        /*) set -- "$CHECK_FILES$1" ;;
        *) set -- "$CHECK_FILES$PWD/$1" ;;
    esac
    command "$CHECK_MKDIR" -p "${1%/*}"
    printf '%s' "$1"
}
_back() { case "$1" in /*) [ -f "$CHECK_FILES$1" ] && echo "$CHECK_FILES$1" || echo "$1" ;;
          *) [ -f "$CHECK_FILES$PWD/$1" ] && echo "$CHECK_FILES$PWD/$1" || echo "$1" ;; esac; }
_reads() {
    local words=() word
    for word in "${@:2}"; do words+=("$(_back "$word")"); done
    command "$1" "${words[@]}"
}
cat() { _reads cat "$@"; }
# Record the flags of a command that are followed by a variable without a value, so that the report can name it.
_note_empty() {
    local text=$1 flag name pattern='(--?[A-Za-z][A-Za-z0-9_-]*)[[:space:]=]+[\"]?[$][{]?([A-Za-z_][A-Za-z0-9_]*|[1-9])[}]?'
    while [[ $text =~ $pattern ]]; do
        text=${text#*"${BASH_REMATCH[0]}"} flag=${BASH_REMATCH[1]} name=${BASH_REMATCH[2]}
        case "$name" in
            [1-9]) [ -n "${CHECK_ARGS[name - 1]:-}" ] || _log :empty "$flag" "$name" ;;
            *) [ -n "${!name:-}" ] || _log :empty "$flag" "$name" ;;
        esac
    done
}
sed() { case " $* " in *" -i"*|*" --in-place"*) _called sed "$@" ;; *) _reads sed "$@" ;; esac; }
command_not_found_handle() { _called "$@"; }
readonly -f _log _called command_not_found_handle  # without _called, the handler would call itself without end
_by_path() {
    case "$1" in
        */bash|*/sh) shift; _shell "$@" ;;
        */*) if [ -L "$CHECK_BIN/${1##*/}" ]; then
                 command "$CHECK_BIN/${1##*/}" "${@:2}"
                 return
             fi ;;&
        *) _file=$(_back "$1")
           if [ -f "$_file" ] && IFS= read -r -n 2 _mark < "$_file" && [ "$_mark" = "#!" ] && [[ "$1" =~ \.(sh|sbatch|slurm)$ ]]; then
               _shell "$@"
           else
               _called "$@"
           fi ;;
    esac
}
_exec() { "$@"; builtin exit $?; }
# Commands with a path are not searched in PATH: a function of that name replaces them before they run.
_before() {
    { local -; set +x; } 2> /dev/null
    case "$1" in *-*'$'*) _note_empty "$1" ;; esac
    local word text=$1 assigned="^[A-Za-z_][A-Za-z_0-9]*=([^[:space:]\"']*|'[^']*'|\"[^\"]*\")[[:space:]]+(.*)$"
    while [[ $text =~ $assigned ]]; do text=${BASH_REMATCH[2]}; done
    word=${text%%[[:space:]]*}
    # PATH=... torchrun: bash searches that PATH before the trap can set it again, but finds a function first.
    if [[ " ${1%"$text"}" == *[[:space:]]PATH=* && "$word" =~ ^[A-Za-z0-9_.+-]+$ ]] && ! declare -F "$word" > /dev/null; then
        builtin eval "function $word { command $word \"\$@\"; }"
    fi
    [[ "$word" =~ ^\"?[A-Za-z0-9_.+/@*\$\{\}-]+\"?$ && "${word%\"}" == "${word#\"}" || "$word" == \"*\" ]] || return 0
    case "$word" in _*|command|builtin) return 0 ;; */*|*'$'*) ;; *) return 0 ;; esac
    set -- "${CHECK_ARGS[@]}"
    builtin eval "word=($word)" 2> /dev/null || return 0
    [[ "$word" =~ ^[A-Za-z0-9_.+/-]*/[A-Za-z0-9_.+-]+$ ]] || return 0
    builtin eval "function $word { _by_path $word \"\$@\"; }"
}
# A script that puts its own programs first in PATH must still reach the stand-ins, so PATH is set again before each command.
trap '{ PATH=$CHECK_BIN; CHECK_ARGS=("$@"); _before "$BASH_COMMAND"; } 2> /dev/null' DEBUG
eval() { builtin eval "$(printf '%s\n' "$*" | _filter)"; }
source() {
    [ -f "$(_back "$1")" ] || { _called source "$@"; return 0; }
    builtin eval "$(_filter "$1" < "$(_back "$1")")"$'\n'
}
.() { source "$@"; }
cd() { builtin cd "$@" 2> /dev/null || _log cd "$@"; }
pushd() { cd "$@"; }
popd() { :; }
kill() { :; }
sleep() { :; }
ulimit() { :; }
