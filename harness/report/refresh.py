"""Makes everything that can be made from a run's rows: summary, table, report. `harness report` does it again."""

from __future__ import annotations

from pathlib import Path

from harness.errors import ResultsError
from harness.results.ceiling import find_ceilings, read_ceilings, write_ceilings
from harness.results.folder import write_parquet, write_summary
from harness.results.summary import Summary, summarize
from harness.results.traced import write_io
from harness.results.whole import WholeRun, read_parts


def seal(folder: Path) -> Summary:
    """Writes summary.json, ceiling.json, requests.parquet and report.html; returns the summary.

    Raises ResultsError where the folder is no run's, or cannot be written.
    """
    from harness.blockio.characterize import characterize
    from harness.report.run.html import write_report

    manifest, rows, samples = read_parts(folder)
    try:
        write_ceilings(folder, manifest.run_id, find_ceilings(manifest, rows, samples))
        summary = summarize(manifest, rows, samples, read_ceilings(folder))
        write_summary(folder, summary)
        write_parquet(folder, rows)
        if (io := characterize(folder)) is not None:
            write_io(folder, io)
        write_report(folder, WholeRun(manifest, rows, samples, summary))
    except OSError as error:
        raise ResultsError(
            f"{folder}: its report cannot be written ({error.strerror or error}); make room, or copy the folder to"
            " where it can be"
        ) from None
    return summary
