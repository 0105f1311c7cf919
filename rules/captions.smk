# Needs: the plan, and the model's tokenizers.
# Makes: reports/captions_{run}.html and .jsonl, on request alone: every text of a run as it will be
#        encoded, its tokens for each encoder, and what is cut off. It encodes nothing.

for run in SESSION.runs:

    rule:
        name:
            f"captions_{run}"
        input:
            order=SESSION.run_order(run, "captions") or workflow.main_snakefile,
        output:
            page=f"reports/captions_{run}.html",
            lines=f"reports/captions_{run}.jsonl",
        log:
            f"logs/captions/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/captions.py"
