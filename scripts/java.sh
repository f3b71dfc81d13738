# Finds a Java that Spark 4 runs on. Sourced by the other scripts.

# The feature version of a java command: 8, 11, 17, 21; nothing if it doesn't run.
java_version() {
    "$1" -version 2>&1 | sed -n -E 's/.*version "(1\.)?([0-9]+).*/\2/p' | head -n 1 || true
}

java_fits() {
    local version
    version="$(java_version "$1")"
    [[ -n "$version" && "$version" -ge 17 ]]
}

# JAVA_HOME for Spark: empty if the java on the PATH is suitable, else the first installation that
# is. Fails if there is none.
java_home() {
    local candidate
    if [[ -n "${JAVA_HOME:-}" ]] && java_fits "$JAVA_HOME/bin/java"; then
        echo "$JAVA_HOME"
        return
    fi
    if [[ -z "${JAVA_HOME:-}" ]] && java_fits java; then
        return
    fi
    for candidate in "${JAVA_INSTALLATIONS:-/usr/lib/jvm}"/*{17,21}*; do
        if [[ -x "$candidate/bin/java" ]] && java_fits "$candidate/bin/java"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}
