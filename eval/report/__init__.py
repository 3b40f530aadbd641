"""One self-contained page that shows everything below a folder of results: `python -m eval.report`."""
