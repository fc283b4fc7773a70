#!/bin/bash
set -e
(cat shop.sql; echo '.mode csv'; echo '.separator , "\n"'
echo 'SELECT name, coalesce(sum(amount), 0) AS total FROM customers LEFT JOIN orders ON customer = id
GROUP BY id ORDER BY total DESC;') | sqlite3 > report.csv
