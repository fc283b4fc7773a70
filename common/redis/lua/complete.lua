-- Publish results and acknowledge their inputs as one unit, where their leases are still held.
-- Atomic against a worker that takes the input over between check and publication (two results), and against the
-- death of this one between publication and acknowledgement (a result, and the input again).
-- KEYS: stream, output.
-- ARGV: group, consumer, schema, results... (entry_id, payload).
-- An empty payload acknowledges without publishing.  Returns 1 (done) or 0 (lease lost) for each pair.
local first, last, num_pairs = ARGV[4], ARGV[#ARGV - 1], (#ARGV - 3) / 2
-- One query finds the leases of inputs that are in order and without gaps, as `fetch` returns them.
local held = {}
for _, entry in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], first, last, num_pairs, ARGV[2])) do
  held[entry[1]] = true
end
local done, acked = {}, {}
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local is_held = held[id]
  if is_held == nil then
    is_held = #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 1
  end
  if is_held then
    if ARGV[i + 1] ~= '' then
      redis.call('XADD', KEYS[2], '*', 'v', ARGV[3], 'p', ARGV[i + 1])
    end
    acked[#acked + 1] = id
  end
  -- An id that is given twice is done once.
  held[id] = false
  done[#done + 1] = is_held and 1 or 0
end
if #acked > 0 then
  -- After all results: if the server's file is cut between them, inputs are delivered again, and none is lost.
  redis.call('XACK', KEYS[1], ARGV[1], unpack(acked))
end
return done
