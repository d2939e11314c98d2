# Sourced by test.sh after setup.sh: SGLang for the tests of its extension, on a machine without a GPU.
# A machine that cannot have it runs the other tests; these are skipped and say why.
sglang=$(python -c 'from q38.serving.requirements import needs
print(*(f"{n.package}{n.specifier}" for n in needs("sglang")))')
if [ -n "$sglang" ] && [ "$(cat .venv/sglang-installed 2>/dev/null)" != "$sglang" ]; then
    install="python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints/cpu.txt"
    # In this order: pip reports what an installed SGLang lacks, and it lacks the CUDA libraries on purpose.
    if $install -r constraints/sglang-cpu.txt && $install --no-deps "$sglang"; then
        echo "$sglang" > .venv/sglang-installed
    else
        echo "SGLang could not be installed: the tests of q38's extension will be skipped" >&2
    fi
fi
