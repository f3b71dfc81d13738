/*
 * The Training tab of Spark's UI: the list of runs and the page of a run, drawn from the JSON that
 * jars/README.md describes and kept up to date while a run lasts.
 *
 * Names, causes and tracebacks are whatever a user's program says: they become text nodes and
 * attributes only, never markup. Spark's pages bring Bootstrap and set `data-bs-theme`; colours are
 * CSS variables, so a switch between light and dark redraws nothing.
 */
// Gradle joins these files, in the order of their names, into one training.js with a scope of its own.
