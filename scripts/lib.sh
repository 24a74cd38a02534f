# Shell functions that the scripts share. Sourced, never run:  . "$(dirname "$0")/lib.sh"
#
# Sourcing goes to the repository's root, so that every script works from any folder.
# A script sets STEPS, then calls `step LABEL COMMAND…`, which prints
#   [2/4] Python packages and Rust core …… 41 s
# with one dot every two seconds. What the command prints goes to a log that is shown only when it fails.

set -euo pipefail
CALLED_FROM=$PWD
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"

RUST_VERSION=1.95.0  # what is installed where there is no Rust
RUST_OLDEST=1.93     # the first with VecDeque::pop_front_if; as in simulator/core/Cargo.toml
PYTHON_RANGE='>=3.11'
PYTHON_SPEED='
import sys, time, timeit
loop = "for number in range(20_000): held[number & 1023] = str(number * number)"
print(min(timeit.repeat(loop, "held = {}", time.process_time, repeat=10, number=1)), sys.executable)
'
STEPS=1
STEP=0
TICKER=
LOG="$(mktemp "${TMPDIR:-/tmp}/harness-step.XXXXXX")"

# Byte code that is not kept is compiled again at each start: 88 s instead of 39 s for vLLM.
unset PYTHONDONTWRITEBYTECODE

stop_ticker() {
    if [ -n "$TICKER" ]; then
        kill "$TICKER" 2>/dev/null || true
        wait "$TICKER" 2>/dev/null || true
        TICKER=
    fi
}
trap 'stop_ticker; rm -f "$LOG"' EXIT

fail() {  # fail MESSAGE: one line with the cure, and the end
    printf 'error: %s\n' "$1" >&2
    exit 1
}

timed() {  # timed LABEL COMMAND…: runs it in this shell; returns its status; sets SECONDS_TAKEN
    local label=$1 began=$SECONDS status=0
    shift
    printf '%s ' "$label"
    # The last sleep outlives the script: it must hold neither the terminal's pipe nor a lock (descriptor 9).
    (exec 9>&-; while sleep 2 >/dev/null 2>&1; do printf '…'; done) &
    TICKER=$!
    "$@" >"$LOG" 2>&1 </dev/null || status=$?
    stop_ticker
    SECONDS_TAKEN=$((SECONDS - began))
    return "$status"
}

step() {  # step LABEL COMMAND…: a numbered step; a failure shows the log's end and stops the script
    local label=$1
    STEP=$((STEP + 1))
    shift
    if timed "[$STEP/$STEPS] $label" "$@"; then
        printf ' %s s\n' "$SECONDS_TAKEN"
    else
        printf ' failed after %s s\n' "$SECONDS_TAKEN"
        tail -n 30 "$LOG" >&2
        exit 1
    fi
}

# Each ensure_… below is one command for `step`: it does nothing where all is there, and its last line of output
# is the one command that cures what it could not do itself.

ensure_uv() {
    uv --version && return
    PATH="$ROOT/.uv/bin:$HOME/.local/bin:$PATH"
    uv --version && return
    if python3 -m venv .uv && .uv/bin/python -m pip install --quiet uv; then
        echo '*' >.uv/.gitignore
    else
        rm -rf .uv
        python3 -m pip install --quiet --user uv || true
    fi
    uv --version && return
    echo "uv could not be installed; run: curl -LsSf https://astral.sh/uv/install.sh | sh"
    return 1
}

ensure_python() {
    uv python find --no-python-downloads "$PYTHON_RANGE" && return
    uv python install 3.12 && return
    echo "no Python $PYTHON_RANGE; run: sudo apt-get install -y python3.12 python3.12-venv"
    return 1
}

# fast_python: for `uv venv --python`, the first of uv's list that is not a sixth slower than the fastest. A Python that
# was built without optimization takes a third longer for all that it interprets, engines included. Each is timed nine
# times, in turns, and its median counts: another guest of the host halves a core's speed for a second, and whichever
# Python runs between two such seconds is the quickest once. UV_PYTHON decides where it is set.
fast_python() {
    local found python
    if [ -n "${UV_PYTHON:-}" ]; then echo "$UV_PYTHON" && return; fi
    found="$(uv python list --only-installed --no-python-downloads "$PYTHON_RANGE" 2>/dev/null | awk '{print $2}')"
    # The list has several names of one Python.
    found="$(time_pythons "$found" | awk '!named[$2]++ {print $2}')"
    python="$(for _ in {1..9}; do time_pythons "$found"; done | LC_ALL=C sort -g | order="$found" awk '
        {took[$2, ++times[$2]] = $1}
        END {
            count = split(ENVIRON["order"], paths, "\n")
            for (path in times) {
                median[path] = took[path, int((times[path] + 1) / 2)]
                if (!least || median[path] < least) least = median[path]
            }
            for (i = 1; i <= count; i++)
                if (paths[i] in median && median[paths[i]] < 1.17 * least) {print paths[i]; exit}
        }')"
    echo "${python:-$PYTHON_RANGE}"
}

time_pythons() {  # time_pythons PATHS: seconds of a loop and the path, for each that starts
    local python
    for python in $1; do "$python" -I -c "$PYTHON_SPEED" 2>/dev/null </dev/null || true; done
}

rust_is_new_enough() {
    local version
    version="$(cargo --version 2>/dev/null | cut -d' ' -f2)"
    [ -n "$version" ] && [ "$(printf '%s\n' "$RUST_OLDEST" "$version" | sort -V | head -n1)" = "$RUST_OLDEST" ]
}

ensure_rust() {
    rust_is_new_enough && return
    PATH="$HOME/.cargo/bin:$PATH"
    rust_is_new_enough && return
    if command -v rustup; then
        rustup toolchain install "$RUST_VERSION" --profile minimal --component clippy --component rustfmt
        export RUSTUP_TOOLCHAIN=$RUST_VERSION
    else
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
            sh -s -- -y --profile minimal --component clippy --component rustfmt --default-toolchain "$RUST_VERSION"
    fi
    rust_is_new_enough && return
    echo "no cargo >= $RUST_OLDEST; run: curl https://sh.rustup.rs -sSf | sh -s -- -y --default-toolchain $RUST_VERSION"
    return 1
}

ensure_core() {  # .venv with the packages of uv.lock and the Rust core, built if its sources changed
    # An environment that is there keeps its Python.
    [ -x .venv/bin/python ] || uv venv --clear --python "$(fast_python)" || return
    uv sync --frozen
}

core_cargo() {  # core_cargo VERB ARGUMENT…: cargo in the Rust core, with the interpreter that .venv has
    local verb=$1 libdir
    shift
    libdir="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')"
    PYO3_PYTHON="$ROOT/.venv/bin/python" LD_LIBRARY_PATH="$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
        cargo "$verb" --manifest-path simulator/core/Cargo.toml "$@"
}

ensure_apt() {  # ensure_apt PACKAGE…: those that are missing
    local package missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    local install=(apt-get install -y --no-install-recommends "${missing[@]}")
    if [ "$(id -u)" = 0 ]; then
        local done=
        export DEBIAN_FRONTEND=noninteractive
        exec 8>"${TMPDIR:-/tmp}/kv-harness-apt.lock"
        flock 8  # an engine's environment is made beside other steps, and apt-get refuses to wait
        # Without the second try, package lists that are missing or old would end it.
        if "${install[@]}" || { apt-get update && "${install[@]}"; }; then done=yes; fi
        exec 8>&-
        [ -z "$done" ] || return 0
    fi
    echo "missing: ${missing[*]}; run: sudo apt-get update && sudo ${install[*]}"
    return 1
}

ensure_engine_apt() {  # ensure_engine_apt NAME: system packages that the engine's Python packages load
    case "$1" in
        # Both load Mooncake: LMCache's server does so at its start, and says only that it wants CUDA where it can't.
        vllm | sglang) ensure_apt libibverbs1 libcurl4 libnuma1 ;;
        *) ;;
    esac
}

ensure_engine() {  # ensure_engine NAME: the environment .engines/NAME
    scripts/engine_env "$1"
}
