# Needs: the command line.
# Makes: ASKED, what the user asked for.

from contextlib import redirect_stderr
from io import StringIO

from latentmake.config.document import check_files
from snakemake.cli import parse_args


def read_arguments():
    """Return what Snakemake was called with, profiles included; it says so itself already."""
    called = Path(sys.argv[0]).stem in ("snakemake", "__main__")
    with redirect_stderr(StringIO()):
        return parse_args(sys.argv[1:] if called else [])[1]


ASKED = read_arguments()
check_files(workflow.overwrite_configfiles or ["config/config.yaml"])

# A file of the user's own replaces the sample's, it does not add to it.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"
