#!/bin/bash
set -e
cat > total.sh <<'P'
#!/bin/bash
total=0
while read -r number || [ -n "$number" ]; do
  total=$((total + number))
done < "$1"
echo $total
P
