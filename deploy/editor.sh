#!/bin/sh
# Builds the editor of the web page (CodeMirror, bundled by esbuild) into exec_service/web/built, once; a second run takes no time.
# Takes the versions of package-lock.json, or the newest with PINS=newest, from the registry that npm is set to. Where that cannot
# be done it says so and ends well: the page then has a plain editor.
set -eu
cd "$(dirname "$0")/.."
source=exec_service/web/editor
built=exec_service/web/built
install=ci
[ "${PINS:-pinned}" != newest ] || install="install --no-package-lock"

stay_plain() { printf 'exec-service: %s, so the web page has a plain editor without colours. %s\n' "$1" "$2" >&2; exit 0; }

wanted=$({ cat "$source"/*.js* deploy/editor.sh; echo "$install"; } | cksum)
[ "$(cat $built/built-from 2>/dev/null)" != "$wanted" ] || exit 0
command -v npm >/dev/null || stay_plain "npm is missing" "To build the other one: apt-get install npm, then make install."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$source"/*.js* "$folder"
mkdir "$folder/built"
# shellcheck disable=SC2086
(cd "$folder" && npm $install --ignore-scripts --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=30000 &&
    ./node_modules/@esbuild/*/bin/esbuild codemirror.js --bundle --minify --format=esm --target=es2022 --log-level=warning \
        --outfile=built/editor.js &&
    cat node_modules/*/LICENSE node_modules/@[!e]*/*/LICENSE > built/LICENSES.txt) >"$folder/log" 2>&1 ||
    stay_plain "npm could not fetch and bundle CodeMirror ($(grep -v '^npm warn' "$folder/log" | head -n 1))" "To try again: make install."
printf '%s\n' "$wanted" > "$folder/built/built-from"
rm -rf $built
mv "$folder/built" $built
