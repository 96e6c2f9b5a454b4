# Sourced by the install.sh of tests that need an environment of their own, with its name and the folder that the user has
# chosen: makes it with torch or the package that is named third, in the user's cache if none is chosen, and sets `folder`.
# Ends the script if it is complete; a complete environment has the file .complete.
folder="${2:-${XDG_CACHE_HOME:-$HOME/.cache}/hybrid_rlhf/$1}"
[ ! -e "$folder/.complete" ] || exit 0
"${PYTHON:-python3.11}" -m venv "$folder"
"$folder/bin/pip" install -q "${3:-torch==2.13.0}"
