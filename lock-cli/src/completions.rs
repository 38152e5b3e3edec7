//! The command `leasehold completions`.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Args;
use crate::output;

/// A bash function that also completes the held keys, for the commands that inspect or release one. Bash splits words
/// at colons, which keys can contain. The part before the last colon is already typed, so it is not inserted again.
const KEYS_IN_BASH: &str = r#"
_leasehold_with_keys() {
    _leasehold "$@"
    local word is_wanted= key
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [[ $word == inspect || $word == release ]] && is_wanted=1
    done
    local typed=${COMP_LINE:0:COMP_POINT}
    typed=${typed##*[[:space:]]}
    [[ $is_wanted && $typed != -* ]] || return 0
    local before=${typed%"${typed##*:}"} url=
    if [[ $COMP_LINE =~ [[:space:]]--url[[:space:]=]+([^[:space:]]+) ]]; then
        url=${BASH_REMATCH[1]#[\'\"]}
        url=${url%[\'\"]}
        # What the shell would still change is not known here.
        [[ $url != *[\'\"\`\$\\]* ]] || return 0
    fi
    while IFS= read -r key; do
        [[ $key == "$typed"* ]] && COMPREPLY+=("$(printf %q "${key#"$before"}")")
    done < <(leasehold ${url:+--url "$url"} list --json 2> /dev/null | sed -n 's/^    "key": "\([^"\\]*\)",$/\1/p')
    return 0
}
complete -F _leasehold_with_keys -o nosort -o bashdefault -o default leasehold
"#;

/// Prints the script for `shell`.
pub(crate) fn print(shell: Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "leasehold", &mut script);
    if shell == Shell::Bash {
        script.extend(KEYS_IN_BASH.bytes());
    }
    output::bytes(&script);
}
