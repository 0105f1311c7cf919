# Needs: a dataset file of musubi-tuner or sd-scripts (--config dataset_toml=FILE).
# Makes: runs/{run}/import.yaml, a configuration of ours for the same, printed too; and the lists
#        that it names. Nothing is declared: what is there already is kept, unless it was edited.

if IMPORTED:

    rule:
        name:
            f"import_{IMPORTED}"
        input:
            order=ancient(
                SESSION.run_order(IMPORTED, "import") or workflow.main_snakefile
            ),
        log:
            f"logs/import/{IMPORTED}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/import.py"
