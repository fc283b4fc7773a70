# The commands of makefiles and what they do, in two columns that fit a terminal of `columns`.

/^[a-z-]+:.*## / {
    names[++count] = $1
    texts[count] = $2
    if (length($1) > width) width = length($1)
}

END {
    for (n = 1; n <= count; n++) {
        line = sprintf("  %-*s ", width, names[n])
        num_words = split(texts[n], words, " ")
        for (i = 1; i <= num_words; i++) {
            if (length(line) + 1 + length(words[i]) > columns) {
                print line
                line = sprintf("  %-*s ", width, "")
            }
            line = line " " words[i]
        }
        print line
    }
}
