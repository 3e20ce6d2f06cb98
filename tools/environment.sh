#!/usr/bin/env bash
# Sees to the environment that a make target runs in:
#
#     tools/environment.sh VENV PYTHON EXTRA
#
# VENV is a folder: PYTHON makes a virtual environment there, and it gets everything that development needs, at the
# versions in constraints.txt. A stamp in it records what it was filled from; while that still holds, nothing is run at
# all. A folder without a stamp is somebody else's, and is left alone.
# VENV is "active": the environment that PYTHON runs in, which gets only what EXTRA asks for and it lacks.
#
# The variable TORCH replaces the pinned PyTorch: a release such as "2.14", with the Triton that it requires, or "newest",
# for which nothing is pinned and pip is asked for newer releases every time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1 python=$2 extra=$3

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

check_python() {
    local minimum version
    minimum=$(sed -n 's/^requires-python = ">=\([0-9.]*\)".*/\1/p' pyproject.toml)
    version=$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))') ||
        fail "expected a Python $minimum or newer called $python; got none that runs" \
            "name one with PYTHON=, for example: make test PYTHON=python3.12"
    "$python" -c "import sys; sys.exit(sys.version_info < (${minimum/./, }))" ||
        fail "expected Python $minimum or newer; $python is Python $version" \
            "name another with PYTHON=, for example: make test PYTHON=python3.12"
}

if [[ $venv == active ]]; then
    [[ -z ${TORCH:-} ]] || fail "expected no TORCH with VENV=active, whose PyTorch stays; got TORCH=$TORCH"
    check_python
    exec "$python" tools/missing.py "$extra"
fi

stamp=$venv/cs336_systems.stamp
constraints=$venv/cs336_systems.constraints
wanted() {
    case ${TORCH:-} in
        "") cat constraints.txt ;;
        newest) ;;
        *)
            # PyTorch 2.11 needs an older setuptools, and the interpreter of its Triton an older NumPy.
            grep -vE '^(torch|triton|setuptools|numpy)==' constraints.txt
            printf '%s\n' "torch==$TORCH.*" 'setuptools>=77.0.3,<82' 'numpy<2.4'
            ;;
    esac
}
# Where the checkout lies belongs to it: an editable install points there.
recipe=$(pwd && cat pyproject.toml && wanted)
[[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$recipe" && ${TORCH:-} != newest ]] && exit 0

[[ ! -e $venv || -f $stamp || -z $(ls -A "$venv") ]] ||
    fail "expected $venv to be missing, empty or made by make; got a folder of somebody else's" \
        "name another with VENV=, or, to use an environment of your own, activate it: make test VENV=active"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # there is none, or it was left half made
    check_python
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "expected $python to have the modules venv and ensurepip, to make $venv with; it lacks one" \
            "install them (Debian and Ubuntu: apt install python3-venv), name another Python with PYTHON=," \
            "or use an environment of your own: make test VENV=active"
    echo "making $venv"
    mkdir -p "$venv"
    : >"$stamp"
    "$python" -m venv "$venv"
    [[ $(cd "$venv" && pwd) != *" "* ]] ||
        echo "torch.compile fails on a CPU where torch lies in a folder with a space in its path; VENV= can name another"
fi

echo "installing into $venv what pyproject.toml asks for"
: >"$stamp" # until all is there
wanted >"$constraints"
install=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --constraint "$constraints")
[[ ${TORCH:-} != newest ]] || install+=(--upgrade --upgrade-strategy eager)
# The build backend comes first, so that the editable install needs no second environment of its own to build in.
"${install[@]}" setuptools
"${install[@]}" --no-build-isolation --editable '.[dev]'
# What pip would do on one core, for most of a minute; files of packages that are no Python of this version are left.
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages >/dev/null || true
printf '%s\n' "$recipe" >"$stamp"
