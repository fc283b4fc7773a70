#!/bin/bash
total=0
while read number; do
  total=$((total + number))
done < $1
echo $total
