{{/* What a schema can't say: rules between values. Each message names the value and the fix. */}}
{{- define "medusa-gateway.validate" -}}
{{- $most := include "medusa-gateway.mostPods" . | int -}}
{{- if not (regexMatch "^[a-z]" (include "medusa-gateway.fullname" .)) }}
{{- fail (printf
  "the full name is %s, and a Service's name must start with a letter: set fullnameOverride to one that does"
  (include "medusa-gateway.fullname" .)
) }}
{{- end }}
{{- if and (eq .Values.redis.mode "embedded") (gt $most 1) }}
{{- fail (printf (print
  "redis.mode is embedded, which is one server for each pod, and there may be %d pods: "
  "set redis.mode to bundled or external, so that they share statistics and limits (or to memory, so that they share nothing)"
) $most) }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail (printf
  "autoscaling.minReplicas (%d) is over autoscaling.maxReplicas (%d): lower the one or raise the other"
  (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)
) }}
{{- end }}
{{- $rollout := include "medusa-gateway.rollout" . | fromYaml }}
{{- if and (has (toString $rollout.maxSurge) (list "0" "0%")) (has (toString $rollout.maxUnavailable) (list "0" "0%")) }}
{{- fail (print
  "rollout.maxSurge and rollout.maxUnavailable are both 0, so no pod could ever be replaced: "
  "raise one of them"
) }}
{{- end }}
{{- if and (eq .Values.cache.type "persistentVolumeClaim") (eq .Values.cache.accessMode "ReadWriteOncePod") }}
{{- if gt $most 1 }}
{{- fail (printf (print
  "cache.accessMode is ReadWriteOncePod, which lets one pod mount the volume, and there may be %d pods: "
  "set it to ReadWriteMany, or replicaCount to 1"
) $most) }}
{{- end }}
{{- if not (has (toString $rollout.maxSurge) (list "0" "0%")) }}
{{- fail (print
  "cache.accessMode is ReadWriteOncePod, which lets one pod mount the volume, so a new pod would wait for "
  "ever beside the old one: set rollout.maxSurge to 0, or leave it out"
) }}
{{- end }}
{{- end }}
{{- if and (eq .Values.auth.mode "secret") (not .Values.auth.secret.name) }}
{{- fail (print
  "auth.mode is secret: set auth.secret.name to the Secret that holds the key file (make one with "
  "'medusa-gateway keys new')"
) }}
{{- end }}
{{- if and (ne .Values.auth.mode "secret") .Values.auth.secret.name }}
{{- fail (printf "auth.secret.name is set, but auth.mode is %s: set it to secret" .Values.auth.mode) }}
{{- end }}
{{- if and .Values.policy.content .Values.policy.existingConfigMap }}
{{- fail "policy.content and policy.existingConfigMap are both set: give the policy in one place" }}
{{- end }}
{{- if and .Values.backends.content .Values.backends.existingConfigMap }}
{{- fail "backends.content and backends.existingConfigMap are both set: give the backends in one place" }}
{{- end }}
{{- if include "medusa-gateway.backendsConfigMap" . }}
{{- range $name, $value := dict
  "model.name" .Values.model.name
  "model.heads" .Values.model.heads
  "model.servedName" .Values.model.servedName
  "model.maxLength" .Values.model.maxLength
  "model.dtype" (trimPrefix "auto" .Values.model.dtype)
  "limits.maxRunning" .Values.limits.maxRunning
  "limits.kvTokens" .Values.limits.kvTokens
}}
{{- if $value }}
{{- fail (printf "%s describes one engine, and backends describes all: say it in the backends file" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.redis.mode "external" }}
{{- with .Values.redis.external }}
{{- if and .urlSecret.name (or .hosts .service .username .passwordSecret.name) }}
{{- fail (print
  "redis.external.urlSecret holds the whole URL: leave hosts, service, username and passwordSecret empty, "
  "or leave urlSecret.name empty"
) }}
{{- end }}
{{- if not (or .urlSecret.name .hosts) }}
{{- fail "redis.mode is external, but no server is named: set redis.external.hosts, or redis.external.urlSecret.name" }}
{{- end }}
{{- if and (eq .kind "sentinel") (not .service) (not .urlSecret.name) }}
{{- fail "redis.external.kind is sentinel: set redis.external.service to the name that the Sentinels watch" }}
{{- end }}
{{- if and (eq .kind "standalone") (gt (len .hosts) 1) }}
{{- fail (print
  "redis.external.kind is standalone, which is one host: name one in redis.external.hosts, or set kind to "
  "sentinel or cluster"
) }}
{{- end }}
{{- if and (eq .kind "cluster") (int .database) }}
{{- fail "redis.external.kind is cluster, which has no databases: set redis.external.database to 0" }}
{{- end }}
{{- if and .tls.caSecret.name (not .tls.enabled) }}
{{- fail "redis.external.tls.caSecret is set, but TLS is off: set redis.external.tls.enabled to true" }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.model.volume.existingClaim .Values.model.volume.hostPath }}
{{- fail "model.volume.existingClaim and model.volume.hostPath are both set: the model lies in one of them" }}
{{- end }}
{{- if and (eq .Values.cache.type "hostPath") (not .Values.cache.hostPath) }}
{{- fail "cache.type is hostPath: set cache.hostPath to a folder that user podSecurityContext.runAsUser may write to" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: name the Gateway that the route attaches to" }}
{{- end }}
{{- include "medusa-gateway.validateExtras" . }}
{{- end }}

{{/* What the operator adds must not be there already: Kubernetes would refuse it, or silently take one of the two. */}}
{{- define "medusa-gateway.validateExtras" -}}
{{- $own := keys (include "medusa-gateway.ownLabels" (list . "gateway") | fromYaml) }}
{{- range $value, $labels := dict
  "commonLabels" .Values.commonLabels
  "podLabels" .Values.podLabels
  "serviceMonitor.labels" .Values.serviceMonitor.labels
  "prometheusRule.labels" .Values.prometheusRule.labels
  "dashboard.labels" .Values.dashboard.labels
}}
{{- range $key, $_ := $labels }}
{{- if has $key $own }}
{{- fail (printf
  "%s: %s is a label of the chart's own, by which its parts find each other: choose another key"
  $value $key
) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.backends.content (hasKey .Values.podAnnotations "checksum/backends") }}
{{- fail (print
  "podAnnotations: checksum/backends is an annotation of the chart's own, which rolls the pods when the "
  "backends change: choose another key"
) }}
{{- end }}
{{- include "medusa-gateway.validateTwice" (list "extraEnv" "variable" list .Values.extraEnv "name") }}
{{- include "medusa-gateway.validateTwice" (list "extraVolumes" "volume"
  (include "medusa-gateway.volumes" . | fromYamlArray)
  .Values.extraVolumes "name"
) }}
{{- include "medusa-gateway.validateTwice" (list "extraVolumeMounts" "mount at"
  (include "medusa-gateway.gatewayMounts" . | fromYamlArray)
  .Values.extraVolumeMounts "mountPath"
) }}
{{- $volumes := list }}
{{- range concat (include "medusa-gateway.volumes" . | fromYamlArray) .Values.extraVolumes }}
{{- $volumes = append $volumes .name }}
{{- end }}
{{- range .Values.extraVolumeMounts }}
{{- if not (has .name $volumes) }}
{{- fail (printf "extraVolumeMounts: there is no volume %s to mount at %s: add it to extraVolumes" .name .mountPath) }}
{{- end }}
{{- end }}
{{- $flags := list "--insecure-no-auth" "--insecure-allow-remote" "--api-keys" }}
{{- range include "medusa-gateway.ownArgs" . | fromYamlArray }}
{{- $flags = append $flags (regexFind "^--[^=]+" .) }}
{{- end }}
{{- range .Values.extraArgs }}
{{- $flag := regexFind "^--[^=]+" . }}
{{- if and (has $flag $flags) (ne $flag "--cors-origin") }}
{{- fail (printf (print
  "extraArgs: %s follows from a value of the chart (see its README), "
  "on which other parts depend as well: set that"
) $flag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Takes (list "the value" "what it is" (the chart's own) (the operator's) "the key that must be there once"). */}}
{{- define "medusa-gateway.validateTwice" -}}
{{- $value := index . 0 }}
{{- $what := index . 1 }}
{{- $key := index . 4 }}
{{- $seen := list }}
{{- range index . 2 }}{{ $seen = append $seen (get . $key | clean) }}{{ end }}
{{- $own := $seen }}
{{- range index . 3 }}
{{- $name := get . $key | clean }}
{{- if has $name $own }}
{{- fail (printf "%s: the chart has a %s %s of its own: choose another %s" $value $what $name $key) }}
{{- else if has $name $seen }}
{{- fail (printf "%s: there are two with the %s %s: keep one" $value $key $name) }}
{{- end }}
{{- $seen = append $seen $name }}
{{- end }}
{{- end }}
